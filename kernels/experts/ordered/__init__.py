"""A mixture's products in Triton by one tile for every number of tokens, so that a token's bits are its own."""
