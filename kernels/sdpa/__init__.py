"""Attention by PyTorch's own backends."""
