"""Recurrence: the gated delta rule over a state, with its convolution, norms and gates; its shape, paths and calls."""
