"""The API process's half of the engine: its client, its streams, its restarts."""
