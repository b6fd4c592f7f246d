"""One step on the device: its inputs, CUDA graphs, sampling."""
