"""Products with weights of 8 and 4 bits in Triton, for GPUs of sm_89 or newer, and the rounding of their inputs."""
