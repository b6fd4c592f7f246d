"""Attention of one or a few new tokens a sequence on sm_90: the kernel, its splits, its launch."""
