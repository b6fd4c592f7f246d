"""Inputs of attention and the cases that every path computes."""
