"""Shared by all routes that generate, whatever protocol their clients speak: from a request to pieces of its answer."""
