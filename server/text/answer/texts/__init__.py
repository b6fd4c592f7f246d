"""Readers of parts of an answer: marks, JSON, literals, bare values."""
