"""Mixtures of experts: which experts a token visits, and the products of those experts.

Beside the folders is what all of them need: the shape, the kinds and the weights of a mixture, the order of mxfp4's
codes, sizes of tiles, and every path with its limits.
"""
