"""A whole model measured under each kernel path."""
