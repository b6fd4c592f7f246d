"""Products by cuBLASLt: its algorithms, which are measured, and what is left to PyTorch."""
