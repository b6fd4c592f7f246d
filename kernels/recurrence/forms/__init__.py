"""Launches, and pieces of kernels, that the forms of a recurrence with Triton kernels of their own share."""
