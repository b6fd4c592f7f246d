"""The package that `pip install` puts in place: the program, and in a built package the rooms below this name.

In a checkout `kernels`, `qualification` and `server` are packages of their own. A wheel holds them as
`hallmark.kernels`, `hallmark.qualification` and `hallmark.server` (build_backend.py), beside others' of those names.
"""
