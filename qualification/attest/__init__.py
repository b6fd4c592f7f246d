"""The kernels that the driver recorded during a forward pass, held against the evidence's."""
