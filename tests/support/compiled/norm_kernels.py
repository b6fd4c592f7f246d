"""The Triton kernels of norms that only some families have."""

from kernels.fused import layer_norm, split_norm
from support.compiled.fused_kernels import kernel_of

layer_norm_kernel = kernel_of(layer_norm, "_layer_norm_kernel")
mean_squares_kernel = kernel_of(split_norm, "_mean_squares_kernel")
norm_by_kernel = kernel_of(split_norm, "_norm_by_kernel")
