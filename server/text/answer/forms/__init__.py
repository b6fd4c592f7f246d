"""Parsers of the forms in which calls are written."""
