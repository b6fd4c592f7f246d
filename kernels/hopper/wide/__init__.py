"""Attention of heads of 512 dimensions on sm_90: prompts, chunks and tokens."""
