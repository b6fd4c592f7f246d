"""The SDPA paths that a CPU can run, against the oracle."""

import pytest
import torch
from attention_inputs import assert_right, attend, flags_for, packed, paged

from kernels.batch import AttentionFlags
from kernels.path import RunAttention
from kernels.sdpa.backends import run_cpu, run_math

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = pytest.mark.parametrize("run", [run_cpu, run_math])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_ragged_lengths(run: RunAttention, dtype: torch.dtype) -> None:
    inputs = packed([31, 1, 0, 33, 300], CPU, heads=(4, 2), dtype=dtype)
    if run is run_cpu and not can_flash_attend(dtype):
        with pytest.raises(RuntimeError, match="only supported when avx512 is supported"):
            attend(run, inputs, flags_for(inputs))
        return
    assert_right(run, inputs, flags_for(inputs))


def can_flash_attend(dtype: torch.dtype) -> bool:
    """Whether PyTorch's flash attention for CPUs takes 64 queries of it.

    On a processor with AMX, ATEN_CPU_CAPABILITY below avx512 makes it raise in bf16 (PyTorch 2.11 to 2.13).
    """
    q = torch.zeros(1, 1, 64, 16, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError:
        return False
    return True


@BOTH
@pytest.mark.parametrize("window", [1, 17, 256, 1000])
def test_windows_over_chunks_of_rows(run: RunAttention, window: int) -> None:
    inputs = packed([600, 3], CPU, heads=(2, 1), head_dim=16)
    assert_right(run, inputs, flags_for(inputs, window=window))


@BOTH
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_over_paged_context(run: RunAttention, window: int | None, dtype: torch.dtype) -> None:
    inputs = paged([1, 5, 16, 3, 0, 40], [15, 16, 17, 33, 8, 300], CPU, heads=(6, 2), dtype=dtype)
    assert_right(run, inputs, flags_for(inputs, window=window))


@BOTH
@pytest.mark.parametrize("window", [None, 1, 16, 17])
def test_decode(run: RunAttention, window: int | None) -> None:
    inputs = paged([1, 1, 0, 1, 1], [1, 16, 5, 130, 0], CPU, heads=(6, 2))
    assert_right(run, inputs, flags_for(inputs, window=window))


@BOTH
def test_full_attention(run: RunAttention) -> None:
    inputs = packed([31, 1, 3], CPU, key_lens=[31, 5, 1])
    assert_right(run, inputs, flags_for(inputs, causal=False))


@BOTH
def test_spans(run: RunAttention) -> None:
    inputs = packed([66, 1], CPU)
    assert_right(run, inputs, flags_for(inputs, "spans", window=7))


@BOTH
def test_queries_before_the_first_key_give_zero(run: RunAttention) -> None:
    inputs = packed([40, 6, 4], CPU, key_lens=[3, 0, 1])
    for window in (None, 2):
        flags = flags_for(inputs, window=window)
        out = attend(run, inputs, flags)
        assert not out[:37].any()
        assert not out[40:49].any()
        assert_right(run, inputs, flags)


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("softcap", "sinks", "spans")])
def test_math_takes_what_sdpa_has_no_word_for(names: tuple[str, ...]) -> None:
    inputs = paged([20, 1, 7, 2], [70, 33, 7, 0], CPU, heads=(4, 2))
    assert_right(run_math, inputs, flags_for(inputs, *names, window=19))
    assert_right(run_math, inputs, flags_for(inputs, *names))


@BOTH
def test_head_dims_beyond_any_kernel(run: RunAttention) -> None:
    inputs = packed([20], CPU, head_dim=320, dtype=torch.float32)
    assert_right(run, inputs, flags_for(inputs))


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
