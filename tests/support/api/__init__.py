"""The API process and the engine process, faked and real."""
