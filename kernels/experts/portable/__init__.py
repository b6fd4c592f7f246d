"""A mixture's products by torch, and in Triton for any GPU of sm_80 or newer, with plain and with mxfp4 weights."""
