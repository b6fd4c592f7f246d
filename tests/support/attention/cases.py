"""Batches for the attention paths as data, and what runs each of them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.processors import num_processors
from kernels.catalog import path_named
from kernels.hopper.decode import launch as decode
from kernels.hopper.decode.variants import variant_of as decode_variant_of
from kernels.hopper.extend import launch as extend
from kernels.hopper.extend.variants import extend_variant_of, longer
from kernels.hopper.prefill import launch as prefill
from kernels.hopper.schedule import plan_tiles
from kernels.hopper.variants import LONG_TILINGS, variant_of
from kernels.vocabulary.path import RunAttention
from support.attention.inputs import Inputs, flags_for, packed, paged

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
IMAGE = 35  # tokens
# Tile edges, no query, and a few long prompts.
PROMPTS = (1, 2, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 255, 256, 257, 300, 777, 1024, 2049, 2500)
# (queries, keys) of sequences of chunks, some longer than their context.
CHUNKS = (1, 63, 0, 130, 5, 64, 129, 300, 2, 33), (300, 63, 17, 257, 128, 64, 1000, 2049, 4000, 0)
# Tile and page edges, no key, no query, and one context among many times longer than the others.
TOKENS = (
    (1,) * 9 + (0,) + (1,) * 8,
    (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 500, 4000, 257, 2),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch for a path.

    queries, keys  lengths, one a sequence; without keys, a prompt's queries and keys share their offsets
    spans          a flag: in prompts, images at every other place; elsewhere at random
    loudness       what the queries are multiplied by
    """

    path: str
    queries: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    dim: int = 128
    heads: tuple[int, int] = (8, 2)
    dtype: torch.dtype = BF16
    page_size: int = 64  # 0: not in pages, as prompts never are
    flags: tuple[str, ...] = ()
    window: int | None = None
    softcap: float | None = None  # in place of that of the flag
    loudness: float = 1.0
    causal: bool = True
    variant: str = ""  # which must serve it
    latent: int = 0  # values are the first so many numbers of the keys; 0: they are others
    value_dim: int = 0  # numbers of a value; 0: as many as of a key

    def __str__(self) -> str:
        named = [self.path, f"{len(self.queries)} of {max(self.queries)}:{max(self.keys or self.queries)}"]
        named += [f"d{self.dim}", f"h{self.heads[0]}:{self.heads[1]}", str(self.dtype)[6:], *self.flags, self.variant]
        named += [] if self.causal else ["full"]
        return " ".join([*named, f"page{self.page_size} window{self.window} {self.softcap} {self.loudness}"])


def _prefill_by_three(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Run prefill by three consumers, which narrow windows and short prompts do not choose."""
    variant = replace(variant_of(q.shape[2], batch, flags), tiling=LONG_TILINGS[64])
    launches = prefill.launches_of(q, k, v, plan_tiles(q.shape[0], batch, flags, variant), flags, out, variant)
    assert launches is not None
    assert launches.over((k.data_ptr(), v.data_ptr()), flags.sinks)


def _extend_by_three(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    variant = longer(extend_variant_of(q.shape[2], k.shape[1], q.shape[1] // k.shape[2], flags))
    launches = extend.launches_of(q, k, v, batch, flags, out, variant=variant)
    assert launches.over((k.data_ptr(), v.data_ptr()), flags.sinks)


def _decode_in_clusters(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Run decode in clusters, over more keys than they are taken for."""
    variant = decode_variant_of(q.shape[2], k.shape[1], (q.shape[1], k.shape[2]), 1, 1, 2048, flags)
    launch = decode.launch_of_clusters(q, k, v, batch, flags, out, variant=variant)
    assert launch is not None, "no room for a cluster"
    assert launch.over((k.data_ptr(), v.data_ptr()), flags.sinks)


FORCED: dict[str, RunAttention] = {
    "gluon.prefill by three": _prefill_by_three,
    "gluon.extend by three": _extend_by_three,
    "gluon.decode in clusters": _decode_in_clusters,
}


def run_of(path: str) -> RunAttention:
    """Return the function of a case's path: one of these, or one of the catalog's, whose Gluon paths are for Hopper."""
    if path in FORCED:
        return FORCED[path]
    name = path.removesuffix(".prefill") if path.startswith(("triton.latent", "triton.asymmetric")) else path
    found = path_named(f"{name}.hopper" if name.startswith("gluon") else name).run
    assert found is not None
    return found


def made(case: Case, device: torch.device = CUDA) -> tuple[RunAttention, Inputs, AttentionFlags]:
    """(function, batch, flags) of a case; skips the test on a GPU that its path is not for."""
    if case.path.startswith("gluon") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    inputs = batch_of(case, device)
    inputs = replace(inputs, q=inputs.q * case.loudness)
    if case.latent:
        inputs = replace(inputs, v=inputs.k[..., : case.latent])
    if case.value_dim:
        inputs = replace(inputs, v=inputs.v[..., : case.value_dim].contiguous())
    flags = flags_for(inputs, *case.flags, window=case.window, causal=case.causal)
    if case.path.startswith("gluon.prefill"):
        spans = None if flags.spans is None else images(case.queries, case.keys or case.queries)
        flags = replace(flags, spans=spans, sinks=None if flags.sinks is None else flags.sinks * 2)
    if case.softcap is not None:
        flags = replace(flags, softcap=case.softcap)
    assert_chosen(case, inputs, flags)
    return run_of(case.path), inputs, flags


def batch_of(case: Case, device: torch.device = CUDA) -> Inputs:
    sizes: dict[str, Any] = {"heads": case.heads, "head_dim": case.dim, "dtype": case.dtype}
    if case.page_size and "prefill" not in case.path:
        return paged(case.queries, case.keys or (), device, page_size=case.page_size, **sizes)
    inputs = packed(case.queries, device, key_lens=case.keys, **sizes)
    if case.keys is None:
        inputs = replace(inputs, batch=replace(inputs.batch, cu_seqlens_k=inputs.batch.cu_seqlens_q))
    return inputs


def images(queries: tuple[int, ...], keys: tuple[int, ...], *, size: int = IMAGE) -> Tensor:
    """Return spans of images of so many tokens, one after the other, at every other place; the rest is empty."""
    rows = []
    for num_rows, num_keys in zip(queries, keys, strict=True):
        for row in range(num_rows):
            image = max(0, num_keys - num_rows + row) // size
            rows.append((image * size, image * size + size) if image % 2 else (0, 0))
    return torch.tensor(rows, dtype=torch.int32, device=CUDA).view(-1, 2)


def assert_chosen(case: Case, inputs: Inputs, flags: AttentionFlags) -> None:
    """The variant that the case is named after serves it."""
    batch, num_tokens = inputs.batch, inputs.q.shape[0]
    if case.variant == "whole tiles":
        variant = extend_variant_of(case.dim, case.page_size, case.heads[0] // case.heads[1], flags)
        assert extend.work_of(num_tokens, *case.heads, batch, variant, num_processors(CUDA)).max_parts == 0
    elif case.variant == "clusters":
        sizes = (case.dim, case.page_size, case.heads, batch.max_seqlen_q, 1, batch.max_context)
        assert decode_variant_of(*sizes, flags).cluster > 1
    elif case.variant:
        variant = variant_of(case.dim, batch, flags)
        found = {
            "three consumers": variant.tiling.consumers == 3,
            "low blocks skipped": variant.skips_low,
            "two parts": len(variant.widths) == 2,
            "polynomials": variant.has_polynomials,
        }
        assert found[case.variant]
