"""Parts of the names of PyTorch's kernels, for paths that are PyTorch's own."""

# What PyTorch launches around a kernel: gathers, casts, masks, copies. None of them multiplies matrices, so that a
# silent switch to the math backend shows as a GEMM whose name is not among these.
TORCH_HELPERS = ("at::native", "Memcpy", "Memset")
GEMMS = ("nvjet", "xmma", "cutlass_", "gemm", "gemv", "bmm", "cublas", "splitK")
