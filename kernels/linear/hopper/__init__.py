"""Products of up to 128 rows on sm_90, in Gluon: the kernels, their tilings and their paths."""
