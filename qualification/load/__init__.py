"""Load on any OpenAI-compatible server, and what came back when. HTTP only: no torch, no server."""
