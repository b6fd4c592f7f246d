"""`triton.ordered` and its kin interpreted: right, and a token's bits depend on its own keys only."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.asymmetric.portable import run_asymmetric
from kernels.calls.batch import AttentionBatch
from kernels.latent.ordered import run_latent_ordered
from kernels.portable.ordered import attend_in_parts
from kernels.portable.wide_ordered import run_wide_ordered
from support.attention.inputs import NAN, Inputs, assert_right, attend, edges, flags_for, packed

pytestmark = pytest.mark.usefixtures("rows_of_one_order")

# A tile is 32 packed rows by 32 keys in the interpreter; parts of two tiles, so that 100 keys lie in two.
RUNS = {
    "triton.ordered": partial(attend_in_parts, part_keys=64),
    "triton.wide.ordered": partial(run_wide_ordered, part_keys=64),
    "triton.asymmetric": partial(run_asymmetric, part_keys=64),
    "triton.latent.ordered": partial(run_latent_ordered, part_keys=64),
}
LENGTH, PAGE_SIZE = 100, 16
BORDERS = (0, 1, 33, 63, 64, 65, 99, LENGTH)


def narrowed(path: str, inputs: Inputs) -> Inputs:
    """Return the inputs that a path is for: values of as many numbers as keys have, of 10, or the first of the keys."""
    if path == "triton.latent.ordered":
        return replace(inputs, v=inputs.k[..., :16])
    return replace(inputs, v=inputs.v[..., :10].contiguous()) if path == "triton.asymmetric" else inputs


def over_pages(inputs: Inputs, sequences: list[tuple[int, int]], device: torch.device) -> Inputs:
    """Chunks [start, end) of one sequence, side by side in a batch, over pages that are NaN where no key is."""
    pool = [torch.full((16, PAGE_SIZE, *x.shape[1:]), NAN, dtype=x.dtype, device=device) for x in (inputs.k, inputs.v)]
    table = torch.randperm(16, device=device)[: -(-LENGTH // PAGE_SIZE)]
    at = torch.arange(LENGTH, device=device)
    for pages, rows in zip(pool, (inputs.k, inputs.v), strict=True):
        pages[table[at // PAGE_SIZE], at % PAGE_SIZE] = rows[:LENGTH]
    lengths, ends = [end - start for start, end in sequences], [end for _, end in sequences]
    batch = AttentionBatch(
        edges(lengths, device), max(lengths), max(ends), page_table=table.int().repeat(len(ends), 1),
        context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
    )  # fmt: skip
    return Inputs(torch.cat([inputs.q[start:end] for start, end in sequences]), pool[0], pool[1], batch)


def differing(found: Tensor, whole: Tensor, sequences: list[tuple[int, int]]) -> list[int]:
    """Return positions at which a batch of chunks has other bits than the whole prompt."""
    positions = [position for start, end in sequences for position in range(start, end)]
    return [p for p, row in zip(positions, found, strict=True) if not torch.equal(row, whole[p])]


@pytest.mark.parametrize("path", RUNS)
@pytest.mark.parametrize(("heads", "names", "window"), [((3, 1), ("sinks", "softcap"), None), ((2, 1), ("sinks",), 37)])
def test_chunks_and_tokens_have_the_bits_of_the_prompt(
    path: str, heads: tuple[int, int], names: tuple[str, ...], window: int | None, device: torch.device
) -> None:
    run = RUNS[path]
    inputs = narrowed(path, packed([LENGTH], device, heads=heads, head_dim=24))
    flags = flags_for(inputs, *names, window=window)
    assert_right(run, inputs, flags)
    whole = attend(run, inputs, flags)
    chunks = list(pairwise(BORDERS))
    tokens = [(position, position + 1) for position in (31, 32, 63, 99)]
    for sequences in (chunks, [chunks[2]], tokens, [tokens[-1]]):
        given = over_pages(inputs, sequences, device)
        assert differing(attend(run, given, flags), whole, sequences) == []


@pytest.mark.parametrize("path", RUNS)
def test_neighbours_do_not_change_a_prompts_bits(path: str, device: torch.device) -> None:
    run = RUNS[path]
    inputs = narrowed(path, packed([40, LENGTH, 3], device, heads=(2, 1), head_dim=24))
    flags = flags_for(inputs)
    mine = slice(40, 40 + LENGTH)
    batch = AttentionBatch(edges([LENGTH], device), LENGTH, LENGTH, cu_seqlens_k=edges([LENGTH], device))
    alone = Inputs(inputs.q[mine], inputs.k[mine], inputs.v[mine], batch)
    assert torch.equal(attend(run, inputs, flags)[mine], attend(run, alone, flags))
