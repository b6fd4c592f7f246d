"""Runs the kernel of `gluon.decode.hopper` for one sequence in numpy, program by program, up to the exchange of parts.

Threads of other programs write to a program's shared memory there, which is for a GPU to show. What is exchanged is put
together here.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.decode import cluster as gluon_decode_cluster
from kernels.hopper.decode import kernel as gluon_decode
from kernels.hopper.decode import stream as gluon_decode_stream
from kernels.hopper.decode.variants import DecodeVariant
from kernels.tma.launches import scales
from support.emulator.gluon_by_numpy import Language, Map, Pointer, array, kernels_in_numpy

_MODULES = (gluon_decode_stream, gluon_decode, gluon_decode_cluster)


def run_clusters(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: DecodeVariant
) -> None:
    assert batch.page_table is not None
    assert batch.context_lens is not None
    language = Language()
    kernels = kernels_in_numpy(language, _MODULES)
    parts: list[tuple[Any, Any]] = []
    kernels["combine_cluster"] = lambda state, target, *_: parts.append((state, target))
    group, heads = variant.group, q.shape[1]
    queries = q.view(-1, heads // group, group, q.shape[2]).transpose(0, 1).numpy()
    maps = [Map(queries, [1, variant.queries, variant.members, variant.block_d])]
    maps += [Map(x.permute(0, 2, 1, 3).numpy(), [1, 1, variant.box_n, variant.block_d]) for x in (k, v)]
    sinks = None if flags.sinks is None else Pointer(flags.sinks.numpy())
    pointers = [Pointer(x.view(-1).numpy()) for x in (batch.cu_seqlens_q, batch.context_lens, batch.page_table)]
    strides = (out.stride(0), out.stride(1))
    numbers = (array(batch.page_table.shape[1]), *scales(flags))
    with np.errstate(all="ignore"):
        for row in range(heads // group * variant.parts):
            parts.clear()
            for rank in range(variant.cluster):
                language.program = (row * variant.cluster + rank, 0)
                kernels["hallmark_gluon_decode_cluster"](
                    *maps, Pointer(out.view(-1).numpy()), sinks, *pointers, *strides, *numbers, variant
                )
            _put_together(parts, flags.sinks, variant)
    assert torch.isfinite(out).all()


def _put_together(parts: list[tuple[Any, Any]], sinks: Tensor | None, variant: DecodeVariant) -> None:
    out, stride_query, stride_head, query, rows, head, first_member = parts[0][1]
    acc = np.concatenate([state[0][0] for state, _ in parts])
    largest, sums = (np.concatenate([state[i] for state, _ in parts]) for i in (1, 2))
    for column in range(variant.columns):
        member = first_member + column % variant.members
        if column // variant.members >= rows or member >= variant.group:
            continue
        query_head = int(head * variant.group + member)
        sink = -np.inf if sinks is None else sinks[query_head].item() * np.log2(np.e)
        top = max(largest[:, column].max(), sink)
        weights = np.exp2(largest[:, column] - top)
        total = (sums[:, column] * weights).sum() + np.exp2(sink - top)
        result = (acc[:, :, column] * weights[:, None]).sum(axis=0) / (total or 1.0)
        begin = int((query + column // variant.members) * stride_query + query_head * stride_head)
        out.memory[begin : begin + variant.head_dim] = result[: variant.head_dim]
