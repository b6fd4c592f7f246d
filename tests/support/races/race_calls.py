"""Calls the Gluon kernels named on the command line once each, on small inputs; made to run under compute-sanitizer.

Inputs are copied from the CPU: initcheck sees no write of a kernel that is not ours. Sequences are many and short: more
tiles than multiprocessors.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.calls.processors import num_processors
from kernels.hopper.decode.launch import run_decode
from kernels.hopper.extend.launch import launches_of as extend_launches
from kernels.hopper.extend.launch import run_extend
from kernels.hopper.extend.variants import extend_variant_of, longer
from kernels.hopper.prefill.launch import launches_of as prefill_launches
from kernels.hopper.schedule import plan_tiles
from kernels.hopper.variants import LONG_TILINGS, TILINGS, Tiling, variant_of
from kernels.hopper.window.launch import run_window_prefill
from kernels.linear.first_path import multiply
from kernels.linear.hopper.tilings import wide_tiling
from kernels.linear.hopper.wide import launch_wide
from kernels.linear.weights import PlainWeight
from support.attention.inputs import Inputs, flags_for, packed, paged

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
HEADS = (8, 2)
LENGTHS = [random.Random(0).choice([1, 63, 64, 130, 300, 420]) for _ in range(24)]
ALL = ("softcap", "sinks", "spans")


def on_gpu(inputs: Inputs, flags: AttentionFlags) -> tuple[Inputs, AttentionFlags]:
    """Copies of all tensors; one tensor stays one."""
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor | None) -> Tensor | None:
        return None if x is None else copies.setdefault(id(x), x.to(CUDA))

    batch = inputs.batch
    names = ("cu_seqlens_q", "cu_seqlens_k", "page_table", "context_lens")
    copied: dict[str, Any] = {name: copy(getattr(batch, name)) for name in names}
    batch = replace(batch, **copied)
    moved = Inputs(inputs.q.to(CUDA), inputs.k.to(CUDA), inputs.v.to(CUDA), batch)
    return moved, replace(flags, sinks=copy(flags.sinks), spans=copy(flags.spans))


def prefill(
    dim: int,
    names: tuple[str, ...] = (),
    tiling: Tiling | None = None,
    *,
    offset: bool = False,
    window: int | None = None,
) -> Tensor:
    inputs = packed(LENGTHS, CPU, heads=HEADS, head_dim=dim, dtype=BF16)
    if not offset:
        inputs = replace(inputs, batch=replace(inputs.batch, cu_seqlens_k=inputs.batch.cu_seqlens_q))
    inputs, flags = on_gpu(inputs, flags_for(inputs, *names, window=100 if names else window))
    q, k, v, batch = inputs.q, inputs.k, inputs.v, inputs.batch
    variant = variant_of(dim, batch, flags)
    variant = replace(variant, tiling=tiling or variant.tiling)
    out = q.clone()
    launches = prefill_launches(q, k, v, plan_tiles(q.shape[0], batch, flags, variant), flags, out, variant)
    assert launches is not None, "TMA can address them"
    assert launches.over((k.data_ptr(), v.data_ptr()), flags.sinks)
    return out


def window(dim: int) -> Tensor:
    inputs = packed(LENGTHS, CPU, heads=HEADS, head_dim=dim, dtype=BF16)
    inputs, flags = on_gpu(inputs, flags_for(inputs, "sinks", window=128))
    out = inputs.q.clone()
    run_window_prefill(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return out


def extend(dim: int, names: tuple[str, ...] = (), *, is_long: bool = False, is_split: bool = False) -> Tensor:
    queries = [40] if is_split else LENGTHS
    contexts = [3000] if is_split else [length + 77 * (i % 4) for i, length in enumerate(LENGTHS)]
    inputs = paged(queries, contexts, CPU, heads=HEADS, head_dim=dim, dtype=BF16, page_size=64)
    inputs, flags = on_gpu(inputs, flags_for(inputs, *names, window=100 if "spans" in names else None))
    out = inputs.q.clone()
    if is_long:
        variant = longer(extend_variant_of(dim, 64, HEADS[0] // HEADS[1], flags))
        launches = extend_launches(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out, variant=variant)
        assert launches.over((inputs.k.data_ptr(), inputs.v.data_ptr()), flags.sinks)
    else:
        run_extend(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return out


def decode(dim: int, queries: int = 1) -> Tensor:
    contexts = [queries + length for length in (1, 64, 65, 700, 1500, 0, 16, 300, 128)]
    inputs = paged([queries] * 9, contexts, CPU, heads=HEADS, head_dim=dim, dtype=BF16, page_size=64)
    inputs, flags = on_gpu(inputs, flags_for(inputs))
    out = inputs.q.clone()
    run_decode(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return out


def skinny(rows: int) -> Tensor:
    x, weight = (torch.randn(n, 1024).to(BF16).to(CUDA) for n in (rows, 12_288))
    return multiply(x, PlainWeight(weight))


def wide(rows: int, size_out: int, size_in: int, *, splits: int) -> Tensor:
    x, weight = (torch.randn(n, size_in).to(BF16).to(CUDA) for n in (rows, size_out))
    tiling = wide_tiling(rows, size_out, size_in, num_processors(CUDA))
    assert tiling is not None
    assert tiling.splits == splits
    y = torch.zeros(rows, size_out, dtype=BF16).to(CUDA)
    launch_wide(x, weight, None, y, tiling)
    return y


CALLS: dict[str, Callable[[], Tensor]] = {
    **{f"prefill {dim}": partial(prefill, dim) for dim in TILINGS},
    **{f"prefill {dim} masked": partial(prefill, dim, ALL) for dim in TILINGS},
    "prefill 64 long": partial(prefill, 64, tiling=LONG_TILINGS[64]),
    "prefill 64 long window": partial(prefill, 64, tiling=LONG_TILINGS[64], window=200),
    **{f"prefill {dim}": partial(prefill, dim) for dim in (80, 192)},  # cut in two
    "prefill 128 offset": partial(prefill, 128, offset=True),
    **{f"window {dim}": partial(window, dim) for dim in (64, 128)},
    **{f"extend {dim}": partial(extend, dim) for dim in TILINGS},
    **{f"extend {dim} split": partial(extend, dim, ("sinks",), is_split=True) for dim in TILINGS},
    "extend 128 masked": partial(extend, 128, ALL),
    "extend 64 long": partial(extend, 64, is_long=True),
    "extend 80 split": partial(extend, 80, is_split=True),  # cut in two
    **{f"decode {dim}": partial(decode, dim) for dim in TILINGS},
    "decode 128 of 3": partial(decode, 128, 3),
    "decode 256 of 8": partial(decode, 256, 8),  # several warps a head
    **{f"skinny {rows}": partial(skinny, rows) for rows in (1, 16, 32)},
    "wide 64": partial(wide, 64, 12_288, 1024, splits=1),
    "wide 64 in clusters": partial(wide, 64, 4096, 2048, splits=2),
    "wide 128 in clusters": partial(wide, 128, 1024, 2048, splits=4),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        out = CALLS[name]()
        assert out.cpu().isfinite().all(), name
        print("finite", name, flush=True)
