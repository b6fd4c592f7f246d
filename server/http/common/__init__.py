"""Shared by all routes: JSON bodies, their validation, and the document of the API."""
