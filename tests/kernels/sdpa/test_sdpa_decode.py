"""A CPU's decode, which takes sequences of about the same length together, against the oracle."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, attend, flags_for, paged
from torch import Tensor

from kernels.sdpa.backends import run_cpu
from kernels.sdpa.cpu_decode import KEPT, Kept

CPU = torch.device("cpu")
RAGGED = (1, 4096, 17, 16, 700, 15, 2, 1111, 690, 64, 63, 65)


def decode(contexts: Sequence[int], *, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 2)) -> Inputs:
    return paged([1] * len(contexts), contexts, CPU, heads=heads, head_dim=32, dtype=dtype)


def num_calls(inputs: Inputs, name: str = "aten::_softmax") -> int:
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


def test_queries_without_keys_give_zero_and_sequences_without_queries_give_nothing() -> None:
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
def test_sequences_of_about_the_same_length_are_one_call(contexts: tuple[int, ...], expected: int) -> None:
    assert num_calls(decode(contexts)) == expected


@pytest.mark.parametrize(("heads", "are_few"), [((4, 2), True), ((8, 8), True), ((6, 2), False), ((9, 9), False)])
def test_rows_are_summed_where_heads_are_few(heads: tuple[int, int], are_few: bool) -> None:
    inputs = decode((40, 50), heads=heads)
    assert (num_calls(inputs, "aten::_scaled_dot_product_flash_attention_for_cpu") == 0) is are_few
    assert_right(run_cpu, inputs, flags_for(inputs))


def test_numbers_of_a_neighbour_change_nothing() -> None:
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


def test_a_sequence_has_in_any_company_what_it_has_alone() -> None:
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


def test_what_was_worked_out_for_a_table_does_not_outlive_its_contents() -> None:
    inputs = decode((40, 50))
    flags = flags_for(inputs)
    attend(run_cpu, inputs, flags)
    assert inputs.batch.page_table is not None
    assert inputs.batch.context_lens is not None
    swap(inputs.batch.page_table)
    swap(inputs.batch.context_lens)
    assert_right(run_cpu, inputs, flags)


def grown(inputs: Inputs, num: int) -> Inputs:
    """The same sequences with `num` tokens more, in pages that they have."""
    assert inputs.batch.context_lens is not None
    batch = replace(inputs.batch, context_lens=inputs.batch.context_lens + num)
    return replace(inputs, q=torch.randn_like(inputs.q), batch=batch)


def begun(contexts: Sequence[int], num_more: int) -> Inputs:
    """Sequences of these lengths that have pages, and keys in them, for `num_more` tokens more."""
    inputs = decode([context + num_more for context in contexts])
    return grown(inputs, -num_more)


def with_kept(inputs: Inputs, kept: Kept) -> Inputs:
    return replace(inputs, batch=replace(inputs.batch, plans={KEPT: kept}))


@pytest.mark.parametrize("contexts", [(40, 40, 40), (33, 40, 3, 300, 47), (1, 2), (4000, 100, 101, 90)])
def test_what_is_kept_while_sequences_grow_changes_nothing(contexts: tuple[int, ...]) -> None:
    inputs, kept = begun(contexts, 80), Kept()  # more than there is room for without gathering again
    flags = flags_for(inputs)
    for num in range(80):
        step = grown(inputs, num)
        torch.testing.assert_close(
            attend(run_cpu, with_kept(step, kept), flags), attend(run_cpu, step, flags), rtol=1e-5, atol=1e-6
        )


def test_only_new_tokens_are_read_of_pages_that_are_kept() -> None:
    inputs, kept = begun((40, 50, 33, 47), 3), Kept()
    flags = flags_for(inputs)
    attend(run_cpu, with_kept(inputs, kept), flags)
    step = grown(inputs, 1)
    expected = attend(run_cpu, step, flags)
    assert step.batch.page_table is not None
    for page in step.batch.page_table[:, 0].tolist():
        step.k[page], step.v[page] = NAN, NAN
    torch.testing.assert_close(attend(run_cpu, with_kept(step, kept), flags), expected, rtol=1e-5, atol=1e-6)


def test_a_neighbours_numbers_do_not_come_with_what_is_kept() -> None:
    inputs, kept = begun((40, 50, 33, 47), 3), Kept()
    flags = flags_for(inputs)
    steps = [grown(inputs, num) for num in range(3)]
    expected = [attend(run_cpu, step, flags) for step in steps]
    assert inputs.batch.page_table is not None
    for page in inputs.batch.page_table[1, :4].tolist():
        inputs.k[page], inputs.v[page] = NAN, float("inf")
    others = [0, 2, 3]
    for step, right in zip(steps, expected, strict=True):
        actual = attend(run_cpu, with_kept(step, kept), flags)
        assert actual[1].isnan().all()
        torch.testing.assert_close(actual[others], right[others], rtol=1e-5, atol=1e-6)


def test_a_layer_that_missed_a_step_is_computed_from_pages() -> None:
    inputs, kept = begun((40, 50), 5), Kept()
    flags = flags_for(inputs)
    other = replace(inputs, k=torch.randn_like(inputs.k), v=torch.randn_like(inputs.v))
    late = replace(inputs, k=torch.randn_like(inputs.k), v=torch.randn_like(inputs.v))
    layers_of_steps = [(inputs, other), (inputs,), (inputs, other, late), (other, inputs), (late,)]
    for num, layers in enumerate([*layers_of_steps, (inputs,)]):
        step = with_kept(grown(inputs, min(num, 3)), kept)  # the last ones are no step ahead
        for layer in layers:
            own = replace(step, k=layer.k, v=layer.v)
            expected = attend(run_cpu, replace(own, batch=replace(step.batch, plans=None)), flags)
            torch.testing.assert_close(attend(run_cpu, own, flags), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num", [1, 63, 64, 65, 127, 129])
def test_lengths_around_a_block_of_keys(num: int) -> None:
    inputs = decode((num, num))
    assert_right(run_cpu, inputs, flags_for(inputs))


def swap(x: Tensor) -> None:
    x.copy_(x.flip(0))
