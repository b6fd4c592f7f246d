"""The CUDA driver's record of what was launched: the kernels of a captured graph, their names and their times."""
