"""A mixture's products in Gluon for sm_90, with weights of 4 bits in groups of 128: the kernel and its launch."""
