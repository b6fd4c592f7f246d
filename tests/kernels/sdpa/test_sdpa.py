"""SDPA's paths on a CPU, beside the rule of test_attention_paths.py."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.sdpa.backends import run_cpu, run_math
from kernels.vocabulary.path import RunAttention
from support.attention.inputs import NAN, Inputs, assert_right, attend, flags_for, packed, paged

CPU = torch.device("cpu")
RAGGED = (1, 4096, 17, 16, 700, 15, 2, 1111, 690, 64, 63, 65)


def decode(contexts: Sequence[int]) -> Inputs:
    return paged([1] * len(contexts), contexts, CPU, heads=(4, 2), head_dim=32, dtype=torch.float32)


@pytest.mark.parametrize("run", [run_cpu, run_math])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_ragged_lengths(run: RunAttention, dtype: torch.dtype) -> None:
    inputs = packed([31, 1, 0, 33, 300], CPU, heads=(4, 2), dtype=dtype)
    if run is run_cpu and not can_flash_attend(dtype):
        with pytest.raises(RuntimeError, match="only supported when avx512 is supported"):
            attend(run, inputs, flags_for(inputs))
        return
    assert_right(run, inputs, flags_for(inputs))


def can_flash_attend(dtype: torch.dtype) -> bool:
    """Return whether PyTorch's flash attention for CPUs takes 64 queries of this shape.

    On a processor with AMX, ATEN_CPU_CAPABILITY below avx512 makes it raise in bf16 (PyTorch 2.11 to 2.13).
    """
    q = torch.zeros(1, 1, 64, 16, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError:
        return False
    return True


def test_math_of_a_long_sequence_never_holds_all_scores() -> None:
    """8 heads x 4096 x 4096 fp32 scores are 512 MiB; a chunk of rows stays far below."""
    inputs = packed([4096], CPU, heads=(8, 8), head_dim=8, dtype=torch.float32)
    flags = AttentionFlags(0.5)
    out = torch.empty_like(inputs.q)
    with torch.profiler.profile(profile_memory=True) as profile:
        run_math(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 64 * 2**20


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch tells why, one warning for each reason
def test_a_pinned_backend_that_cannot_run_raises() -> None:
    inputs = packed([8], CPU, heads=(2, 2))
    q = torch.randn(8, 64, 2, dtype=torch.float16).transpose(1, 2)  # flash attention wants a last dim of stride 1
    out = torch.empty_like(inputs.q)
    with pytest.raises(RuntimeError, match="No available kernel"):
        run_cpu(q, inputs.k, inputs.v, inputs.batch, flags_for(inputs), out)


def num_calls(inputs: Inputs, name: str = "aten::_scaled_dot_product_flash_attention_for_cpu") -> int:
    with torch.profiler.profile() as profile:
        attend(run_cpu, inputs, flags_for(inputs))
    return sum(event.name == name for event in profile.events())


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


def swap(x: Tensor) -> None:
    x.copy_(x.flip(0))
