"""Compiling without measuring: ahead of a run in other processes, and to PTX for a comparison of checkouts."""
