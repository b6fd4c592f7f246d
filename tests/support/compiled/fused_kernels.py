"""The Triton kernels of the fused ops, by the names that profiles and attestations show."""

from types import ModuleType
from typing import Any

from kernels.fused import (
    activation,
    add_norms,
    asymmetric_kv,
    gated_norm,
    head_gate,
    index_kv,
    latent_kv,
    norm,
    rope_kv,
    row_gate,
)
from kernels.latent import head_products


def kernel_of(module: ModuleType, name: str) -> Any:
    [kernel] = [it for it in vars(module).values() if getattr(it, "__name__", None) == name and hasattr(it, "warmup")]
    return kernel


add_shared_kernel = kernel_of(row_gate, "_add_shared_kernel")
gate_heads_kernel = kernel_of(head_gate, "_gate_heads_kernel")
norm_and_gate_kernel = kernel_of(gated_norm, "_norm_and_gate_kernel")
head_products_kernel = kernel_of(head_products, "_head_products_kernel")
gated_kernel = kernel_of(activation, "_gated_kernel")
add_norms_kernel = kernel_of(add_norms, "_add_norms_kernel")
rms_norm_kernel = kernel_of(norm, "_rms_norm_kernel")
rope_kernel = kernel_of(rope_kv, "_rope_and_write_kv_kernel")
asymmetric_kernel = kernel_of(asymmetric_kv, "_asymmetric_kv_kernel")
latent_kernel = kernel_of(latent_kv, "_latent_kv_kernel")
index_kernel = kernel_of(index_kv, "_index_kv_kernel")
