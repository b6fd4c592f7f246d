"""Attention on sm_90 whose bits depend on a token's own keys only: in prefill, extend, decode and verify alike."""
