"""Hostile inputs of each operator: the batches, rows and sums on which wrong kernels go wrong."""
