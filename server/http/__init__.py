"""The routes of the HTTP API, their schemas and their answers."""
