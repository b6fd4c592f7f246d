"""A mixture's products in Gluon for sm_90, with weights and inputs of 8 bits: kernels, tilings, launch."""
