"""Attention whose values have fewer numbers than its keys, and are numbers of their own."""
