"""Checks of each operator: a path runs on hostile inputs, and its errors against fp64 are measured."""
