"""Requests to tokens: the HTTP edge, text, the engine process, the model and its telemetry."""
