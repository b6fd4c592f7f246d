"""Attention to the keys that an indexer chooses, Triton's in its interpreter: the choice and the oracle's rule.

Scores are sums of small integers, so that many keys tie and one choice is right. Unused slots are NaN and the tails of
page tables poisoned.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, IndexedFlags, with_index
from kernels.calls.rows import keys_of, sequences_of
from kernels.catalog import path_named
from kernels.reference.choice import choice_oracle, why_wrong_choice
from kernels.reference.compare import compare
from support.attention.inputs import NAN, Inputs, packed, paged

FP16, FP32 = torch.float16, torch.float32
COUNT, INDEX_HEADS, INDEX_DIM = 20, 3, 16
KEY, LATENT = 24, 16
PATHS = ("sdpa.cpu.latent.indexed", "triton.latent.indexed", "torch.attention.latent.indexed.tiles")
NOT_WRITTEN = -(2**30)
# Queries and keys of sequences: below the choice, at it and beyond, several tiles, none.
PROMPTS = (COUNT - 1, 1, 0, 70, COUNT + 1)
CHUNKS = (11, 1, 0, 3, 20), (COUNT + 5, 90, 0, 3, 20)
TOKENS = (1, 1, 0, 1, 1), (COUNT, 100, 0, 1, COUNT + 1)


def integers(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, sizes, generator=generator) * (torch.rand(sizes, generator=generator) < 0.5)


def indexed(
    queries: Sequence[int],
    keys: Sequence[int] | None,
    dtype: torch.dtype,
    *,
    heads: int = 2,
    weight: float = 1.0,
    count: int = COUNT,
) -> tuple[Inputs, IndexedFlags]:
    """Return a batch, packed without `keys`, and its flags with the right choice."""
    device, sizes = torch.device("cpu"), {"heads": (heads, 1), "head_dim": KEY + INDEX_DIM, "dtype": dtype}
    torch.manual_seed(len(queries) + heads)
    inputs = packed(queries, device, **sizes) if keys is None else paged(queries, keys, device, page_size=16, **sizes)  # type: ignore[arg-type]
    of_index = inputs.k[..., KEY:]
    is_read = ~of_index.isnan()
    of_index.copy_(torch.where(is_read, integers(*of_index.shape, seed=1).to(dtype), NAN))
    rows = inputs.q.shape[0]
    index = Index(
        torch.full((rows, count), NOT_WRITTEN, dtype=torch.int32),
        integers(rows, INDEX_HEADS, INDEX_DIM, seed=2).to(dtype),
        integers(rows, INDEX_HEADS, seed=3).float() * weight,
    )
    if keys is None:
        inputs = replace(inputs, batch=replace(inputs.batch, cu_seqlens_k=inputs.batch.cu_seqlens_q))
    right = replace(index, chosen=choice_oracle(index, of_index, inputs.batch))
    inputs = replace(inputs, q=inputs.q[..., :KEY].contiguous(), v=inputs.k[..., :LATENT])
    return inputs, with_index(AttentionFlags(scale=0.3), right)


def run(path: str, inputs: Inputs, flags: IndexedFlags) -> tuple[Tensor, Tensor]:
    """Return the output and the choice of a call that must write both, or read the choice where it is given."""
    found = path_named(path).run
    assert found is not None
    if flags.index.queries is not None:
        flags = replace(flags, index=replace(flags.index, chosen=torch.full_like(flags.index.chosen, NOT_WRITTEN)))
    out = torch.full((*inputs.q.shape[:2], LATENT), NAN, dtype=inputs.q.dtype)
    found(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return out, flags.index.chosen


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "weight"),
    [(PROMPTS, None, 2, 1.0), (*CHUNKS, 33, 1.0), (*TOKENS, 2, 1.0), (*TOKENS, 1, 0.0)],
    ids=["prompts", "chunks", "tokens", "tied"],
)
def test_the_right_keys_are_chosen_and_attended_to(
    queries: tuple[int, ...], keys: tuple[int, ...] | None, heads: int, weight: float, path: str
) -> None:
    inputs, flags = indexed(queries, keys, FP32 if heads == 2 else FP16, heads=heads, weight=weight)
    for given in (flags, with_index(flags, flags.index.as_given())):
        out, chosen = run(path, inputs, given)
        assert torch.equal(chosen, flags.index.chosen)
        errors = compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags)
        assert errors.is_within_rule, errors


@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_same_choice_and_bits_in_other_batches(path: str) -> None:
    inputs, flags = indexed(*TOKENS, FP32)
    out, chosen = run(path, inputs, flags)
    table, lengths = inputs.batch.page_table, inputs.batch.context_lens
    assert table is not None
    assert lengths is not None
    one = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32), 1, 128, page_table=table[1:2], context_lens=lengths[1:2]
    )
    alone = replace(inputs, q=inputs.q[1:2], batch=one)
    alone_out, alone_chosen = run(path, alone, with_index(flags, flags.index.rows(slice(1, 2))))
    assert torch.equal(alone_chosen[0], chosen[1])
    if path != "sdpa.cpu.latent.indexed":
        assert torch.equal(alone_out[0], out[1])


@pytest.mark.usefixtures("rows_of_one_order")
@pytest.mark.parametrize("path", [it for it in PATHS if path_named(it).order is not None])
def test_tokens_have_the_bits_of_the_prompt(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut 70 chosen keys of 100 into parts of 32, which a token's programs compute apart and a prompt's one by one."""
    monkeypatch.setattr("kernels.indexed.launch_config._PART", 32)
    inputs, flags = indexed((100,), None, FP32, count=70)
    whole, chosen = run(path, inputs, flags)
    pages = inputs.k.new_full((7, 16, 1, inputs.k.shape[2]), NAN)
    pages.view(-1, 1, inputs.k.shape[2])[:100] = inputs.k[:100]
    for row in (0, 31, 64, 69, 70, 99):
        batch = AttentionBatch(
            torch.tensor([0, 1], dtype=torch.int32), 1, 100, page_table=torch.arange(7, dtype=torch.int32)[None],
            context_lens=torch.tensor([row + 1], dtype=torch.int32),
        )  # fmt: skip
        token = Inputs(inputs.q[row : row + 1], pages, pages[..., :LATENT], batch)
        out, own = run(path, token, with_index(flags, flags.index.rows(slice(row, row + 1))))
        assert torch.equal(own[0], chosen[row])
        assert torch.equal(out[0], whole[row])


def test_what_no_right_kernel_chooses_is_named() -> None:
    inputs, flags = indexed(*CHUNKS, FP32)
    sequence = sequences_of(inputs.batch)[1]
    rows = slice(sequence.start, sequence.end)
    keys = keys_of(inputs.k[..., KEY:], inputs.batch, sequence)[:, 0]
    positions = torch.arange(sequence.num_queries) + sequence.position(sequence.start)
    index = flags.index.rows(rows)
    assert why_wrong_choice(index, keys, positions) is None
    assert index.queries is not None
    assert index.weights is not None
    last = index.chosen[-1].tolist()
    scores = index.weights[-1] @ (index.queries[-1] @ keys.T).relu()
    left_out = int(scores.argmin())
    cases = {
        "a position ahead": [*last[:-1], sequence.num_keys],
        "one twice": [last[0], *last[:-1]],
        "one missing": [*last[:-1], -1],
        "another key": sorted([*(it for it in last if it != int(scores[last].argmax())), left_out])[-COUNT:],
    }
    for name, wrong in cases.items():
        changed = index.chosen.clone()
        changed[-1] = torch.tensor(wrong)
        error = why_wrong_choice(replace(index, chosen=changed), keys, positions)
        assert error is not None, name
        assert error.row == sequence.num_queries - 1
