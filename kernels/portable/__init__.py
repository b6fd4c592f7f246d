"""Attention in Triton for any GPU of sm_80 or newer: tile, prefill, extend, decode."""
