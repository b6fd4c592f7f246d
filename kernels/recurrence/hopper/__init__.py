"""Kernels of the recurrence for Hopper."""
