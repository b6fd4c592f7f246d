"""Weights of 8 and 4 bits, and their products by PyTorch."""
