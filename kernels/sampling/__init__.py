"""Sampling of token ids from logits: penalties, top-k, top-p, min-p, and the draw."""
