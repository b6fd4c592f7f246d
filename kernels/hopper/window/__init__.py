"""Attention of fresh prompts under a short window on sm_90: the kernel and its launch."""
