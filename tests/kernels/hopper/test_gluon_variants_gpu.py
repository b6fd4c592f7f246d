"""Variants of `gluon.prefill.hopper` that few shapes choose, on an sm_90 GPU: against the oracle's rule."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, packed

from kernels.batch import AttentionFlags
from kernels.hopper.prefill.launch import launches_of, run_prefill
from kernels.hopper.schedule import plan_tiles
from kernels.hopper.variants import LONG, LONG_SOFTCAP, LONG_TILINGS, LONG_WINDOW, variant_of
from kernels.reference.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 300, 777, 2049]


def prompts(lengths: list[int], dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    inputs = packed(lengths, CUDA, heads=(4, 2), head_dim=dim, dtype=dtype)
    return replace(inputs, batch=replace(inputs.batch, cu_seqlens_k=inputs.batch.cu_seqlens_q))


@pytest.mark.parametrize("window", [LONG_WINDOW, LONG_WINDOW + 65, 100_000])
def test_three_consumers_under_a_window_are_within_the_rule(window: int) -> None:
    inputs = prompts([5, LONG + 9, 0, 300, 193])
    flags = AttentionFlags(64**-0.5, window=window, sinks=torch.randn(4, device=CUDA) * 2)
    assert variant_of(64, inputs.batch, flags).skips_low
    assert_right(run_prefill, inputs, flags)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 500])
def test_consumers_ending_at_different_blocks_are_right(window: int) -> None:
    """Narrower windows than three consumers are chosen for: every way in which a window's edge can cut a tile."""
    inputs = prompts(LENGTHS)
    q, k, v, batch, flags = inputs.q, inputs.k, inputs.v, inputs.batch, AttentionFlags(64**-0.5, window=window)
    variant = replace(variant_of(64, batch, flags), tiling=LONG_TILINGS[64])
    out = torch.full_like(q, NAN)
    launches = launches_of(q, k, v, plan_tiles(q.shape[0], batch, flags, variant), flags, out, variant)
    assert launches is not None
    assert launches.over((k.data_ptr(), v.data_ptr()), None)
    assert compare(out, q, k, v, batch, flags).is_within_rule


@pytest.mark.parametrize("dim", [72, 80, 88, 96, 136, 192])
def test_head_dims_that_are_cut_are_within_the_rule(dim: int) -> None:
    inputs = prompts(LENGTHS, dim)
    assert len(variant_of(dim, inputs.batch, AttentionFlags(1.0)).widths) == 2
    assert_right(run_prefill, inputs, AttentionFlags(dim**-0.5))


@pytest.mark.parametrize("dim", [80, 136, 192])
@pytest.mark.parametrize("window", [None, 1, 65, 300])
def test_cut_head_dims_are_right_with_context_and_flags(window: int | None, dim: int) -> None:
    inputs = packed(LENGTHS, CUDA, key_lens=[x + 70 for x in LENGTHS], heads=(4, 2), head_dim=dim, dtype=torch.bfloat16)
    sinks = torch.randn(4, device=CUDA) * 2
    assert_right(run_prefill, inputs, AttentionFlags(dim**-0.5, window=window, softcap=30.0, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
@pytest.mark.parametrize("softcap", [5.0, 50.0, 1000.0])
def test_polynomials_under_a_softcap_are_within_the_rule(softcap: float, sharpness: float, dtype: torch.dtype) -> None:
    """The last cap lets weights be so small that no normal number holds them."""
    inputs = prompts([*LENGTHS, LONG_SOFTCAP + 9], dtype=dtype)
    q, k, v, batch = inputs.q, inputs.k, inputs.v, inputs.batch
    flags = AttentionFlags(sharpness * 64**-0.5, softcap=softcap, sinks=torch.randn(4, device=CUDA))
    assert variant_of(64, batch, flags).has_polynomials
    out = torch.full_like(q, NAN)
    run_prefill(q, k, v, batch, flags, out)
    assert compare(out, q, k, v, batch, flags).is_within_rule
