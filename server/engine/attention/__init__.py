"""Choice of the kernel path that computes the attention of a step, and the time that it takes."""
