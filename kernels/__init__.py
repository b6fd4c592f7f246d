"""Paths of attention, linear layers, experts and sums over ranks; sampling and fused operations; their references.

Knows no model, no HTTP and no matrix. Import direction: kernels <- qualification <- server.
"""
