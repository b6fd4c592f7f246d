"""Decisions: the kernel path that serves a shape, and the shapes that a model needs."""
