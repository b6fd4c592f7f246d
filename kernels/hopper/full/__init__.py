"""Attention of packed sequences whose tokens see each other both ways (Gluon for sm_90): towers of images."""
