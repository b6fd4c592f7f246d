"""Attention paths, linear layers, sampling and fused operations, with their limits and references.

Knows no model, no HTTP and no matrix. Import direction: kernels <- qualification <- server.
"""
