"""Faults that are switched on in an engine that serves, by its own seams, and which check sees each of them."""
