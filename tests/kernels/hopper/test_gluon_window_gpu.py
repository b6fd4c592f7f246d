"""`gluon.prefill.window.hopper` on an sm_90 GPU: against the oracle's rule."""

import random

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, attend, flags_for, packed

from kernels.hopper.window.launch import run_window_prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
LENGTHS = [1, 2, 31, 32, 33, 0, 63, 64, 65, 127, 128, 129, 159, 160, 161, 300, 777, 2049]
BF16, FP16 = torch.bfloat16, torch.float16


def ragged(keys: list[int] | None = None, *, heads: tuple[int, int] = (16, 2), dim: int = 64) -> Inputs:
    return packed(LENGTHS, CUDA, key_lens=keys, heads=heads, head_dim=dim, dtype=BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("dim", "heads"), [(64, (64, 8)), (64, (12, 2)), (64, (2, 1)), (128, (32, 4))])
def test_ragged_prompts_are_within_the_rule(dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = packed(LENGTHS, CUDA, heads=heads, head_dim=dim, dtype=dtype)
    assert_right(run_window_prefill, inputs, flags_for(inputs, "sinks", window=128))


@pytest.mark.parametrize("names", [(), ("sinks",)])
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 63, 64, 100, 127, 128])
def test_windows_are_within_the_rule(window: int, names: tuple[str, ...]) -> None:
    inputs = ragged()
    assert_right(run_window_prefill, inputs, flags_for(inputs, *names, window=window))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [128, 20])
def test_queries_after_a_context_and_before_the_first_key(window: int, dim: int) -> None:
    keys = [max(0, length + 211 * (i % 3) - 70 * (i % 2)) for i, length in enumerate(LENGTHS)]
    inputs = ragged(keys, dim=dim)
    assert_right(run_window_prefill, inputs, flags_for(inputs, "sinks", window=window))


@pytest.mark.parametrize("dim", [64, 128])
def test_a_sequence_of_nan_reaches_no_other(dim: int) -> None:
    inputs = packed([190, 65, 300], CUDA, heads=(8, 2), head_dim=dim, dtype=BF16)
    flags = flags_for(inputs, "sinks", window=128)
    clean = attend(run_window_prefill, inputs, flags)
    for x in (inputs.q, inputs.k, inputs.v):
        x[190:255] = NAN
    dirty = attend(run_window_prefill, inputs, flags)
    assert torch.equal(clean[:190], dirty[:190])
    assert torch.equal(clean[255:], dirty[255:])


@pytest.mark.parametrize("dim", [64, 128])
def test_ten_repeats_are_bit_equal(dim: int) -> None:
    lengths = [random.Random(0).randrange(1, 3000) for _ in range(300)]  # more than the scheduler looks at at once
    inputs = packed(lengths, CUDA, heads=(16, 2), head_dim=dim, dtype=BF16)
    flags = flags_for(inputs, "sinks", window=128)
    first = attend(run_window_prefill, inputs, flags)
    assert first.isfinite().all()
    for _ in range(9):
        assert torch.equal(first, attend(run_window_prefill, inputs, flags))


def test_tensors_that_tma_cannot_address_are_still_right() -> None:
    wide = torch.randn(300, 4, 65, device=CUDA, dtype=BF16)  # rows of 130 bytes, not a multiple of 16
    batch = packed([100, 200], CUDA, heads=(4, 2), dtype=BF16).batch
    inputs = Inputs(wide[..., :64], wide[:, :2, 1:], wide[:, 2:, :64], batch)
    assert_right(run_window_prefill, inputs, flags_for(inputs, window=128))


def test_a_batch_of_empty_sequences_writes_nothing() -> None:
    inputs = packed([256], CUDA, heads=(4, 2), dtype=BF16)
    inputs.batch.cu_seqlens_q.zero_()
    out = attend(run_window_prefill, inputs, flags_for(inputs, window=128))
    torch.cuda.synchronize()
    assert out.isnan().all()
