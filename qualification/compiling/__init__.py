"""Compiling without a launch: processes side by side, and a pretended GPU on which code asks for its kernels."""
