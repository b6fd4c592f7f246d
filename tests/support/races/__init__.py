"""Programs that run Gluon kernels under tools that look for races."""
