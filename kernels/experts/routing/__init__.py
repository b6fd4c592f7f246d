"""The choice of experts: the specification by torch, the kernel in Triton, and the visits sorted by expert."""
