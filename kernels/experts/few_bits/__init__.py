"""Mixtures whose experts have 8 or 4 bits: their weights, and their products by PyTorch and in Triton."""
