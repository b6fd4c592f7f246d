"""Attention in Gluon for sm_90 (TMA, wgmma): what its prefill, extend and decode kernels share."""
