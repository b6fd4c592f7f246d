"""Gluon for sm_90 over pages of 8 bits: decode, with the shares of work of `kernels/hopper/decode`."""
