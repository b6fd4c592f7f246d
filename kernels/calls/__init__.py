"""One call of a kernel: its batch and what the layers of a step share of it, the GPU that sizes it, its launch."""
