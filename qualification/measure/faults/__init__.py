"""Planted faults of each operator: wrong kernels that the checks must refuse before they may prove anything."""
