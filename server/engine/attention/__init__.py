"""Which kernel path computes the attention of a step, and the time that it takes."""
