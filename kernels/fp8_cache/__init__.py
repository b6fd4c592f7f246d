"""Attention over a KV cache of 8 bits: `pages` (its layout and rounding), kernels that read it, in Triton and Gluon."""
