"""A mixture's products in Gluon for sm_90, with weights that stay codes of 4 bits until they are multiplied."""
