"""TMA descriptors, prepared launches of Gluon kernels, and thread block clusters."""
