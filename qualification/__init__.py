"""Proof of kernel paths: what is proven, how, and which path to choose. Imports kernels, never the server."""
