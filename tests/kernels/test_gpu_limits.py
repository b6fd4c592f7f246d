"""Our paths on an sm_90 GPU: memory that grows with tokens and no faster, and arguments that are refused."""

from collections.abc import Callable

import pytest
import torch
from attention_inputs import NAN, Inputs, flags_for, packed, paged

from kernels.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.hopper.decode.launch import run_decode
from kernels.hopper.extend.launch import run_extend
from kernels.hopper.prefill.launch import run_prefill
from kernels.path import RunAttention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
Make = Callable[[int], Inputs]


def prompt(tokens: int, dim: int = 128) -> Inputs:
    return packed([tokens], CUDA, heads=(8, 2), head_dim=dim, dtype=BF16)


def chunk(tokens: int, page_size: int = 64) -> Inputs:
    return paged([tokens], [2 * tokens], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=page_size)


def step(tokens: int, page_size: int = 64) -> Inputs:
    return paged([1] * 8, [tokens // 8] * 8, CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=page_size)


def of_17_queries() -> Inputs:
    return paged([17], [100], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)


def peak_bytes(run: RunAttention, inputs: Inputs) -> int:
    """Most memory that a call has at once beside its arguments."""
    out, flags = torch.empty_like(inputs.q), flags_for(inputs)
    run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("library", ["gluon", "triton"])
@pytest.mark.parametrize(("phase", "make"), [("prefill", prompt), ("extend", chunk), ("decode", step)])
def test_peak_memory_is_linear_in_tokens(phase: str, make: Make, library: str) -> None:
    """Scores of one KV head alone would be 3 GiB in the larger batch; parts of split keys are at most some 16 MiB."""
    run = path_named(f"{library}.{phase}" + (".hopper" if library == "gluon" else "")).run
    assert run is not None
    few, many = (peak_bytes(run, make(tokens)) for tokens in (4096, 32_768))
    assert many <= 8 * few + 2**24, (few, many)


REFUSED: dict[str, tuple[RunAttention, Callable[[], Inputs], AttentionFlags]] = {
    "causal": (run_prefill, lambda: prompt(70), AttentionFlags(0.1, causal=False)),
    "head_dim: .* found 36": (run_prefill, lambda: prompt(70, 36), AttentionFlags(0.1)),
    "head_dim: .* found 264": (run_prefill, lambda: prompt(70, 264), AttentionFlags(0.1)),
    "causal: ": (run_extend, lambda: chunk(70), AttentionFlags(0.1, causal=False)),
    "page_size: .* found 24": (run_extend, lambda: chunk(70, 24), AttentionFlags(0.1)),
    "mask": (run_decode, lambda: step(70), AttentionFlags(0.1, causal=False)),
    "page_size: .* found 40": (run_decode, lambda: step(70, 40), AttentionFlags(0.1)),
    "max_seqlen_q: .* found 17": (run_decode, of_17_queries, AttentionFlags(0.1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_written(message: str) -> None:
    run, make, flags = REFUSED[message]
    inputs = make()
    out = torch.full_like(inputs.q, NAN)
    with pytest.raises(ValueError, match=message):
        run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    assert out.isnan().all()
