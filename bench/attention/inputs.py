"""The tensors of a case: random packed or paged data, and the same data in the dense form of peers."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attention.cases import BenchCase
from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import keys_of, sequences_of
from kernels.system.device import torch_dtype

_MAX_ROWS = 48  # rows of the output that are compared with the oracle
_MAX_SEQUENCES = 6  # that these rows are from: the oracle reads all keys of each in fp64


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case on a device.

    q     [tokens, heads, head_dim]
    k, v  [key tokens, kv_heads, head_dim] packed, or pages [num_pages, page_size, kv_heads, head_dim]
    rows  [n] int64, ascending: the rows of the output that are compared with the oracle
    """

    case: BenchCase
    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    flags: AttentionFlags
    rows: Tensor


def make_inputs(case: BenchCase, device: torch.device, *, seed: int) -> Inputs:
    """Unit-variance random input; pages lie scattered, and every slot of them holds a finite value."""
    shape = case.shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch_dtype(shape.dtype), device=device, generator=generator)

    heads = (shape.num_kv_heads, shape.head_dim)
    if shape.page_size is None:
        size = [sum(case.keys), *heads]
    else:
        size = [sum(_num_pages(case)), shape.page_size, *heads]
    sinks = torch.randn(shape.num_heads, device=device, generator=generator) if shape.sinks else None
    return Inputs(
        case=case,
        q=normal(sum(case.queries), shape.num_heads, shape.head_dim),
        k=normal(*size),
        v=normal(*size),
        batch=_batch(case, device, generator),
        flags=AttentionFlags(shape.head_dim**-0.5, window=shape.window, softcap=shape.softcap, sinks=sinks),
        rows=_rows(case, seed).to(device),
    )


def dense(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(q [seqs, heads, queries, head_dim], k, v [seqs, kv_heads, keys, head_dim]), contiguous copies.

    The lengths of the batch must be equal.
    """
    q = inputs.q.view(len(inputs.case.queries), -1, *inputs.q.shape[1:]).transpose(1, 2).contiguous()
    sequences = sequences_of(inputs.batch)
    k, v = (
        torch.stack([keys_of(x, inputs.batch, sequence).transpose(0, 1) for sequence in sequences])
        for x in (inputs.k, inputs.v)
    )
    return q, k, v


def repaged(inputs: Inputs, page_size: int, *, seed: int) -> Inputs:
    """Copy keys and values from pages into scattered pages of another size."""
    case = replace(inputs.case, shape=replace(inputs.case.shape, page_size=page_size))
    generator = torch.Generator(inputs.q.device).manual_seed(seed)
    batch = _batch(case, inputs.q.device, generator)
    assert batch.page_table is not None
    k, v = (x.new_zeros(sum(_num_pages(case)), page_size, *x.shape[2:]) for x in (inputs.k, inputs.v))
    for index, sequence in enumerate(sequences_of(inputs.batch)):
        spare = -sequence.num_keys % page_size
        pages = batch.page_table[index, : (sequence.num_keys + spare) // page_size].long()
        for target, source in ((k, inputs.k), (v, inputs.v)):
            tokens = F.pad(keys_of(source, inputs.batch, sequence), (0, 0, 0, 0, 0, spare))
            target[pages] = tokens.view(-1, page_size, *tokens.shape[1:])
    return replace(inputs, case=case, k=k, v=v, batch=batch)


def _num_pages(case: BenchCase) -> list[int]:
    assert case.shape.page_size is not None
    return [-(-length // case.shape.page_size) for length in case.keys]


def _batch(case: BenchCase, device: torch.device, generator: torch.Generator) -> AttentionBatch:
    cu_seqlens_q = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32, device=device)
    longest = max(case.queries), max(case.keys)
    if case.shape.page_size is None:
        cu_seqlens_k = cu_seqlens_q  # one tensor, as in a server: `gluon.prefill.hopper` has a faster variant for that
        if case.keys != case.queries:
            cu_seqlens_k = torch.tensor([0, *accumulate(case.keys)], dtype=torch.int32, device=device)
        return AttentionBatch(cu_seqlens_q, *longest, cu_seqlens_k=cu_seqlens_k)
    counts = _num_pages(case)
    order = torch.randperm(sum(counts), generator=generator, device=device).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        table[index, :count] = order[end - count : end]
    lens = torch.tensor(case.keys, dtype=torch.int32, device=device)
    return AttentionBatch(cu_seqlens_q, *longest, page_table=table, context_lens=lens)


def _rows(case: BenchCase, seed: int) -> Tensor:
    """The first, the last and drawn rows of a few sequences, the longest among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(case.queries), generator=generator)[: _MAX_SEQUENCES - 1].tolist()
    chosen = sorted({case.keys.index(max(case.keys)), *drawn})
    ends = list(accumulate(case.queries))
    rows: set[int] = set()
    for index in chosen:
        end, count = ends[index], case.queries[index]
        offsets = torch.randint(count, (_MAX_ROWS // len(chosen) - 2,), generator=generator).tolist()
        rows |= {end - count, end - 1, *(end - count + offset for offset in offsets)}
    return torch.tensor(sorted(rows), dtype=torch.int64)
