"""Attention over latents to the keys that an indexer chooses: the choice and the attention, in one call."""
