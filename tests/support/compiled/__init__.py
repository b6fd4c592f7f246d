"""Programs that compile kernels for sm_90 without a GPU, and readers of the machine code."""
