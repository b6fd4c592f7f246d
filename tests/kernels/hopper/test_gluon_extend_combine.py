"""Parts of a tile's keys add up to attention over all of them: as planned, computed here, combined by the kernel."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.calls.rows import keys_of, sequences_of
from kernels.hopper.extend.launch import Work, combine_parts, plan_extend, tiles_of, work_of
from kernels.hopper.extend.variants import extend_variant_of
from kernels.hopper.schedule import HEADER, ITEM
from kernels.hopper.variants import TILINGS, Variant
from kernels.reference.oracle import attention_oracle
from support.attention.inputs import NAN, Inputs, flags_for, paged

PROCESSORS = 132


def parts_of(
    inputs: Inputs, flags: AttentionFlags, variant: Variant, work: Work, plan: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(parts, logs, out): what the attention kernel leaves. Only rows of whole tiles are in out; the rest is NaN."""
    scratch = work.max_parts, work.tile_heads, TILINGS[64].block_m
    parts = torch.full((*scratch, variant.tiling.block_d), NAN, device=inputs.q.device)
    logs = torch.full(scratch, NAN, device=inputs.q.device)
    out = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags).to(inputs.q.dtype)
    numbers = tiles_of(plan, work).tolist()
    sequences = sequences_of(inputs.batch)
    for index in range(numbers[2]):
        item = numbers[HEADER.value + index * ITEM.value :][: ITEM.value]
        row, rows, position, _, sequence, begin, end, place = item
        if place < 0:
            continue
        out[row : row + rows] = NAN
        keys, values = (keys_of(x, inputs.batch, sequences[sequence])[begin:end].float() for x in (inputs.k, inputs.v))
        group = inputs.q.shape[1] // keys.shape[1]
        queries = inputs.q[row : row + rows].float() * flags.scale  # [rows, heads, head_dim]
        heads = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("rhd,nhd->rhn", queries, heads[0])
        seen = torch.arange(begin, end)[None] <= position + torch.arange(rows)[:, None]
        scores = scores.masked_fill(~seen[:, None].to(scores.device), float("-inf"))
        total = scores.logsumexp(2) / torch.log(torch.tensor(2.0))
        weighted = torch.einsum("rhn,nhd->rhd", scores.softmax(2).nan_to_num(0.0), heads[1])
        pack, tiles = variant.pack, work.tile_heads
        used = slice(0, rows * pack)
        logs[place, :, used] = total.view(rows, tiles, pack).transpose(0, 1).reshape(tiles, -1)
        packed_rows = weighted.view(rows, tiles, pack, -1).transpose(0, 1).reshape(tiles, rows * pack, -1)
        parts[place, :, used, : weighted.shape[2]] = packed_rows
    return parts, logs, out


@pytest.mark.parametrize(("heads", "names"), [((4, 1), ()), ((3, 1), ("sinks",))])  # packed rows, one head a tile
def test_parts_add_up_to_attention(heads: tuple[int, int], names: tuple[str, ...], device: torch.device) -> None:
    inputs = paged([5, 40, 1], [1100, 600, 200], device, heads=heads, head_dim=40, page_size=64)
    flags = flags_for(inputs, *names)
    variant = extend_variant_of(40, 64, heads[0] // heads[1], flags)
    work = work_of(46, *heads, inputs.batch, variant, PROCESSORS)
    plan = plan_extend(inputs.batch, flags, variant, work, PROCESSORS)
    parts, logs, out = parts_of(inputs, flags, variant, work, plan)
    assert out.isnan().any(), "something is split"
    combine_parts(plan, (parts, logs), out, flags, variant, work)()
    expected = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)
    assert (out.double() - expected).abs().max() < 2e-3  # one rounding to fp16 of values up to 4


def test_rows_that_see_no_key_of_any_part_are_zero(device: torch.device) -> None:
    inputs = paged([4], [2000], device, heads=(4, 1), page_size=64)
    flags = flags_for(inputs)
    variant = extend_variant_of(64, 64, 4, flags)
    work = work_of(4, 4, 1, inputs.batch, variant, PROCESSORS)
    plan = plan_extend(inputs.batch, flags, variant, work, PROCESSORS)
    parts, logs, out = parts_of(inputs, flags, variant, work, plan)
    parts.nan_to_num_(0.0)
    logs.fill_(float("-inf"))
    combine_parts(plan, (parts.zero_(), logs), out, flags, variant, work)()
    assert torch.equal(out, torch.zeros_like(out))
    sinks = replace(flags, sinks=torch.zeros(4, device=device))
    out.fill_(NAN)
    combine_parts(plan, (parts, logs), out, sinks, variant, work)()
    assert torch.equal(out, torch.zeros_like(out))
