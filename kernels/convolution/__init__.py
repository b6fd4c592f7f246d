"""Convolution: gated, short and causal, over the latest inputs of a sequence; its shape, paths and calls."""
