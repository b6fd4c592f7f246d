"""Attention of fresh prompts on sm_90: the kernel and its launch."""
