"""Which kernel path serves a shape, and the shapes that a model needs."""
