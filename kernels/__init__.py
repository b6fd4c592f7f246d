"""What can run, what it needs, and what is true: attention paths, fused ops and their references.

Knows no model, no HTTP and no matrix. Import direction: kernels <- qualification <- server.
"""
