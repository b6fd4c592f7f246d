"""triton.prefill against the oracle."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, assert_right, attend, edges, flags_for, packed

from kernels.batch import AttentionBatch
from kernels.portable.prefill import run_prefill

# In the interpreter a tile is 32 packed rows by 32 keys: lengths are one off each edge, for a group of one.
RAGGED = [31, 1, 0, 33, 64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ragged_lengths_at_tile_edges(dtype: torch.dtype, device: torch.device) -> None:
    inputs = packed(RAGGED, device, heads=(1, 1), dtype=dtype)
    assert_right(run_prefill, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])  # groups of 1, 4 and 7
def test_query_heads_share_the_keys_of_their_group(heads: tuple[int, int], device: torch.device) -> None:
    inputs = packed([9, 17], device, heads=heads, head_dim=16)
    assert_right(run_prefill, inputs, flags_for(inputs))


@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])  # below an MMA's 16, and padded to a power of two
def test_head_dims(head_dim: int, device: torch.device) -> None:
    inputs = packed([34, 5], device, head_dim=head_dim)
    assert_right(run_prefill, inputs, flags_for(inputs, "sinks"))


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 1000])
def test_windows_at_their_borders(window: int, device: torch.device) -> None:
    inputs = packed([70, 3], device, heads=(1, 1))
    assert_right(run_prefill, inputs, flags_for(inputs, window=window))


def test_full_attention_sees_the_keys_after_a_query(device: torch.device) -> None:
    inputs = packed(RAGGED, device)
    assert_right(run_prefill, inputs, flags_for(inputs, causal=False))


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("spans",)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_flag(names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    inputs = packed([40, 1, 33], device, dtype=dtype)
    assert_right(run_prefill, inputs, flags_for(inputs, *names))


def test_all_flags_at_once(device: torch.device) -> None:
    inputs = packed([66, 5], device, heads=(4, 2))
    assert_right(run_prefill, inputs, flags_for(inputs, "softcap", "sinks", "spans", window=7))


def test_a_span_reaches_before_the_window_and_past_the_tile(device: torch.device) -> None:
    inputs = packed([100], device, heads=(1, 1))
    spans = torch.tensor([2, 99], dtype=torch.int32, device=device).repeat(100, 1)
    spans[:50] = 0
    assert_right(run_prefill, inputs, replace(flags_for(inputs, window=3), spans=spans))


@pytest.mark.parametrize("window", [None, 5])
def test_queries_are_the_last_positions_of_longer_keys(window: int | None, device: torch.device) -> None:
    inputs = packed([3, 1, 33], device, key_lens=[40, 33, 65])
    assert_right(run_prefill, inputs, flags_for(inputs, window=window))


@pytest.mark.parametrize("names", [(), ("sinks",)])
def test_queries_before_the_first_key_give_zero(names: tuple[str, ...], device: torch.device) -> None:
    inputs = packed([40, 6], device, key_lens=[3, 0])
    flags = flags_for(inputs, *names)
    out = attend(run_prefill, inputs, flags)
    assert torch.equal(out[:37], torch.zeros_like(out[:37]))
    assert torch.equal(out[40:], torch.zeros_like(out[40:]))
    assert_right(run_prefill, inputs, flags)


def test_a_sink_of_minus_infinity_is_no_sink(device: torch.device) -> None:
    inputs = packed([5], device)
    sinks = torch.full((2,), float("-inf"), device=device)
    plain = attend(run_prefill, inputs, flags_for(inputs))
    assert torch.equal(attend(run_prefill, inputs, replace(flags_for(inputs), sinks=sinks)), plain)


def test_nan_in_one_sequence_stays_in_it(device: torch.device) -> None:
    inputs = packed([20, 30, 10], device)
    inputs.k[20:50], inputs.v[20:50] = NAN, NAN
    out = attend(run_prefill, inputs, flags_for(inputs))
    assert torch.isfinite(out[:20]).all()
    assert torch.isfinite(out[50:]).all()
    assert torch.isnan(out[20:50]).all()


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_logits_do_not_overflow(scale: float, device: torch.device) -> None:
    inputs = packed([40], device)
    out = attend(run_prefill, inputs, replace(flags_for(inputs), scale=scale))
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], inputs.v[:1].expand(2, -1, -1)[:, 0])  # one key: its value exactly


def test_slices_of_one_tensor_are_read_by_their_strides(device: torch.device) -> None:
    inputs = packed([33], device, heads=(2, 2))
    qkv = torch.cat([inputs.q, inputs.k[:33], inputs.v[:33]], dim=1)
    q, k, v = qkv.split(2, dim=1)
    expected = attend(run_prefill, inputs, flags_for(inputs))
    out = torch.full((33, 5, 64), NAN, dtype=q.dtype, device=device)
    run_prefill(q, k, v, inputs.batch, flags_for(inputs), out[:, 1:3])
    assert torch.equal(out[:, 1:3], expected)
    assert torch.isnan(out[:, 0]).all()
    assert torch.isnan(out[:, 3:]).all()


def test_loose_host_bounds_change_nothing(device: torch.device) -> None:
    inputs = packed([33, 2], device)
    loose = replace(inputs, batch=replace(inputs.batch, max_seqlen_q=300, max_context=999))
    assert torch.equal(attend(run_prefill, loose, flags_for(inputs)), attend(run_prefill, inputs, flags_for(inputs)))


def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch(device: torch.device) -> None:
    inputs = packed([33, 40], device)
    whole = attend(run_prefill, inputs, flags_for(inputs))
    alone = replace(
        inputs,
        q=inputs.q[33:],
        k=inputs.k[33:],
        v=inputs.v[33:],
        batch=AttentionBatch(edges([40], device), 40, 40, cu_seqlens_k=edges([40], device)),
    )
    assert torch.equal(attend(run_prefill, alone, flags_for(inputs)), whole[33:])


def test_keys_beyond_2_to_the_31_elements_are_found(device: torch.device) -> None:
    """40 tokens, 2^26 elements apart: 5 GiB of addresses each, of which only the tokens' own pages are touched."""
    inputs = packed([40], device)
    stride = 2**26
    wide_k, wide_v = (
        torch.empty(40 * stride, dtype=torch.float16, device=device).as_strided((40, 1, 64), (stride, 64, 1))
        for _ in "kv"
    )
    wide_k.copy_(inputs.k[:40])
    wide_v.copy_(inputs.v[:40])
    expected = attend(run_prefill, inputs, flags_for(inputs))
    assert torch.equal(attend(run_prefill, replace(inputs, k=wide_k, v=wide_v), flags_for(inputs)), expected)
