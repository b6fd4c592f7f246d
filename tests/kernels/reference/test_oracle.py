"""The oracle against loops over single numbers, and naive attention against the oracle."""

import math

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.reference.oracle import attention_oracle
from support.attention.inputs import Inputs, flags_for, packed, paged

CPU = torch.device("cpu")


def sees(query: int, key: int, row: int, flags: AttentionFlags) -> bool:
    if not flags.causal:
        return True
    if flags.spans is not None and flags.spans[row, 0] <= key < flags.spans[row, 1]:
        return True
    return key <= query and (flags.window is None or query - key < flags.window)


def attend_by_loops(inputs: Inputs, flags: AttentionFlags) -> Tensor:
    """Attention of a packed batch, one number at a time."""
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    out = torch.zeros_like(q)
    cu_q = inputs.batch.cu_seqlens_q.tolist()
    assert inputs.batch.cu_seqlens_k is not None
    cu_k = inputs.batch.cu_seqlens_k.tolist()
    for sequence in range(inputs.batch.num_seqs):
        num_keys = cu_k[sequence + 1] - cu_k[sequence]
        for row in range(cu_q[sequence], cu_q[sequence + 1]):
            query = num_keys - (cu_q[sequence + 1] - row)
            seen = [key for key in range(num_keys) if sees(query, key, row, flags)]
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                logits = [flags.scale * float(q[row, head] @ k[cu_k[sequence] + key, kv_head]) for key in seen]
                if flags.softcap is not None:
                    logits = [flags.softcap * math.tanh(logit / flags.softcap) for logit in logits]
                weights = [math.exp(logit) for logit in logits]
                total = sum(weights) + (0.0 if flags.sinks is None else math.exp(float(flags.sinks[head])))
                for key, weight in zip(seen, weights, strict=True):
                    out[row, head] += weight / total * v[cu_k[sequence] + key, kv_head]
    return out


@pytest.mark.parametrize("names", [(), ("softcap",), ("sinks",), ("spans",), ("softcap", "sinks", "spans")])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False)])
def test_the_oracle_agrees_with_loops_over_single_numbers(
    names: tuple[str, ...], window: int | None, causal: bool
) -> None:
    inputs = packed([3, 1, 0, 6], CPU, key_lens=[3, 4, 2, 5], heads=(6, 2), head_dim=8)  # groups of another number
    flags = flags_for(inputs, *names, window=window, causal=causal)
    expected = attend_by_loops(inputs, flags)
    actual = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_paged_batch_has_the_truth_of_its_packed_twin() -> None:
    inputs = paged([2, 1, 5], [17, 16, 5], CPU, heads=(4, 2), head_dim=8, page_size=4)
    table = inputs.batch.page_table
    assert table is not None
    rows = [(table[i, p // 4].item(), p % 4) for i, n in enumerate([17, 16, 5]) for p in range(n)]
    k, v = (torch.stack([pages[page, slot] for page, slot in rows]) for pages in (inputs.k, inputs.v))
    twin = packed([2, 1, 5], CPU, key_lens=[17, 16, 5], heads=(4, 2), head_dim=8).batch
    flags = flags_for(inputs, "sinks", window=6)
    expected = attention_oracle(inputs.q, k, v, twin, flags)
    assert torch.equal(attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags), expected)


def test_chosen_rows_are_those_of_the_whole() -> None:
    inputs = packed([3, 9, 1], CPU)
    flags = flags_for(inputs, "spans", window=2)
    rows = torch.tensor([0, 2, 7, 12])
    whole = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)
    some = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)
    torch.testing.assert_close(some, whole[rows], rtol=1e-13, atol=1e-13)


def test_a_long_sequence_is_computed_in_chunks() -> None:
    num_tokens = 1500  # x 1500 keys x 8 heads is more than a chunk holds
    q, k, v = torch.randn(3, num_tokens, 8, 4, dtype=torch.float64)
    batch = packed([num_tokens], CPU).batch
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.5
    )
    actual = attention_oracle(q, k, v, batch, AttentionFlags(0.5))
    torch.testing.assert_close(actual, expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
