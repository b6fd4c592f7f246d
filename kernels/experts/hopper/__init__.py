"""A mixture's products in Gluon for sm_90, with weights of 16 bits: the kernels, their tilings and their launch."""
