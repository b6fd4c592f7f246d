"""A CPU's decode, which takes sequences of about the same length together, against the oracle."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, attend, flags_for, paged
from torch import Tensor

from kernels.sdpa.backends import run_cpu

CPU = torch.device("cpu")
RAGGED = (1, 4096, 17, 16, 700, 15, 2, 1111, 690, 64, 63, 65)


def decode(contexts: Sequence[int], *, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 2)) -> Inputs:
    return paged([1] * len(contexts), contexts, CPU, heads=heads, head_dim=32, dtype=dtype)


def num_calls(inputs: Inputs, name: str = "aten::_scaled_dot_product_flash_attention_for_cpu") -> int:
    with torch.profiler.profile() as profile:
        attend(run_cpu, inputs, flags_for(inputs))
    return sum(event.name == name for event in profile.events())


@pytest.mark.parametrize("window", [None, 1, 16, 17, 100, 5000])
def test_ragged_lengths_and_windows(window: int | None) -> None:
    inputs = decode(RAGGED)
    assert_right(run_cpu, inputs, flags_for(inputs, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8), (8, 1)])
def test_groups_of_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = decode((33, 40, 3, 300), dtype=dtype, heads=heads)
    assert_right(run_cpu, inputs, flags_for(inputs, window=35))


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes(page_size: int) -> None:
    inputs = paged([1] * 5, [1, 4, 5, 64, 130], CPU, heads=(2, 1), dtype=torch.float32, page_size=page_size)
    for window in (None, 3):
        assert_right(run_cpu, inputs, flags_for(inputs, window=window))


def test_a_window_means_nothing_without_a_causal_mask() -> None:
    inputs = decode((40, 90))
    assert_right(run_cpu, inputs, flags_for(inputs, window=7, causal=False))


def test_queries_without_keys_give_zero() -> None:
    inputs = paged([1, 0, 1, 1, 0, 1], [0, 70, 90, 0, 0, 80], CPU, heads=(4, 2), dtype=torch.float32)
    flags = flags_for(inputs)
    out = attend(run_cpu, inputs, flags)
    assert not out[[0, 2]].any()
    assert_right(run_cpu, inputs, flags)


def test_a_batch_without_any_key_gives_zeros() -> None:
    inputs = decode((0, 0))
    assert not attend(run_cpu, inputs, flags_for(inputs)).any()


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ((100,) * 8, 1),
        ((100, 101, 90, 96, 120, 112, 97, 80), 1),
        ((4000, 100, 101, 90), 2),  # the short ones would be 40 times as long
        ((4000, 4000, 4000, 4000), 2),  # 8192 keys at once at most
    ],
)
def test_sequences_of_similar_length_are_one_call(contexts: tuple[int, ...], expected: int) -> None:
    assert num_calls(decode(contexts)) == expected


def test_a_neighbours_numbers_change_nothing() -> None:
    inputs = decode((40, 50, 33, 47))
    flags = flags_for(inputs)
    expected = attend(run_cpu, inputs, flags)
    assert inputs.batch.page_table is not None
    for page in inputs.batch.page_table[1, :4].tolist():
        inputs.k[page], inputs.v[page] = NAN, float("inf")
    inputs.q[1] = NAN
    actual = attend(run_cpu, inputs, flags)
    assert actual[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(actual[others], expected[others])


def test_a_sequence_is_computed_alike_alone_and_batched() -> None:
    inputs = decode(RAGGED)
    flags = flags_for(inputs, window=200)
    together, batch = attend(run_cpu, inputs, flags), inputs.batch
    assert batch.page_table is not None
    assert batch.context_lens is not None
    for row in range(len(RAGGED)):
        edges = torch.tensor([0, 1], dtype=torch.int32)
        table, lengths = batch.page_table[row : row + 1], batch.context_lens[row : row + 1]
        own = replace(batch, cu_seqlens_q=edges, page_table=table, context_lens=lengths)
        alone = attend(run_cpu, replace(inputs, q=inputs.q[row : row + 1], batch=own), flags)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-6)


def test_a_page_table_changed_in_place_is_read_again() -> None:
    inputs = decode((40, 50))
    flags = flags_for(inputs)
    attend(run_cpu, inputs, flags)
    assert inputs.batch.page_table is not None
    assert inputs.batch.context_lens is not None
    swap(inputs.batch.page_table)
    swap(inputs.batch.context_lens)
    assert_right(run_cpu, inputs, flags)


@pytest.mark.parametrize("num", [1, 63, 64, 65, 127, 129])
def test_lengths_around_a_block_of_keys(num: int) -> None:
    inputs = decode((num, num))
    assert_right(run_cpu, inputs, flags_for(inputs))


def swap(x: Tensor) -> None:
    x.copy_(x.flip(0))
