"""One call of a kernel: the batch that it gets, the GPU that sizes it, its launch, and what is kept for the next."""
