"""Gluon kernels run by numpy."""
