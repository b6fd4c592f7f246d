"""Attention whose values are the first numbers of its keys: multi-head latent attention, after its products."""
