"""Costs of a call: its time beside the rates of the machine, its kernels, and the bytes that it moves."""
