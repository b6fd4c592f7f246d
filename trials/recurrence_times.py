"""Time recurrences on a GPU, and fla-core where it is installed, in CUDA graphs.

PYTHONPATH=. python trials/recurrence_times.py [--form channel-delta] [--out FILE]

Sizes of Qwen3.5-35B-A3B: 16 key heads, 32 value heads of 128, convolution of 4; of Kimi Linear 48B-A3B, Nemotron 3 Nano
and Ling 2.6 Flash for the other forms. Ours holds convolution, norms and gates; fla-core's has the norms alone. To it a
state space and lightning attention are `simple_gla`, with as many heads of keys as of values. A graph holds several
calls on other slots each, 256 in all, so that no state is in the L2; the median of its replays counts. In decode, and
where tokens are verified, half a chunk is behind each row's border, and no row is padding: those of the server have no
token.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.machine import commit_of_code, machine_of
from kernels.recurrence.calls import RecurrenceRows
from kernels.recurrence.channel_delta.launch import run_channel_delta
from kernels.recurrence.fixed_decay.launch import run_fixed_decay
from kernels.recurrence.portable.launch import run_recurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space.launch import run_state_space
from kernels.system.device import read_fingerprint
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.recurrence_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.state_slots import Part, recurrence_slots

Call = Callable[[], object]
SIZES = {
    RecurrenceForm.GATED_DELTA: RecurrenceSizes(16, 32, 128, 128, 4),
    RecurrenceForm.CHANNEL_DELTA: RecurrenceSizes(32, 32, 128, 128, 4),
    RecurrenceForm.STATE_SPACE: RecurrenceSizes(8, 64, 128, 64, 4),
    RecurrenceForm.FIXED_DECAY: RecurrenceSizes(32, 32, 128, 128, 1),
}
RUNS = {
    RecurrenceForm.GATED_DELTA: run_recurrence,
    RecurrenceForm.CHANNEL_DELTA: run_channel_delta,
    RecurrenceForm.STATE_SPACE: run_state_space,
    RecurrenceForm.FIXED_DECAY: run_fixed_decay,
}
PROMPTS = ([8192], [1024] * 8, [2048], [128])
ROWS = (1, 8, 64)
VERIFIED, DRAFTED = (2, 4), 3  # tokens of a row that verifies, and the most that may be taken back
BEFORE = 96  # tokens of a sequence that decodes
SETS = 256  # slots of all calls of a graph
ROW_FIELDS = ("starts", "stops", "firsts", "folded", "sources", "targets")
DEVICE = torch.device("cuda")


def timed_us(calls: Sequence[Call]) -> float:
    """Return the median time of a call; each reads other memory."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return median(times)


def first_rows(rows: RecurrenceRows, num_rows: int) -> RecurrenceRows:
    """Return the first rows of a call, without those that are padding."""
    cut = {name: getattr(rows, name)[:num_rows] for name in ROW_FIELDS}
    return replace(rows, **cut)


def ours(form: RecurrenceForm, lengths: Sequence[int], phase: Phase, state_dtype: Dtype) -> list[Call]:
    """Return calls of rows of so many tokens."""
    sizes, run = SIZES[form], RUNS[form]
    shape = RecurrenceShape.of(sizes, phase, Dtype.BF16, state_dtype, TokenRows.of(sum(lengths)), form)
    generator = torch.Generator().manual_seed(1)
    weights = drawn_weights(shape, generator, DEVICE)
    before, num_rows = (0 if phase is Phase.EXTEND else BEFORE), len(lengths)
    num_sets = 2 if phase is Phase.EXTEND else max(2, SETS // num_rows)
    num_drafted = DRAFTED if phase is Phase.VERIFY else 0
    slots = recurrence_slots(shape, weights, num_rows * num_sets, num_drafted, DEVICE)
    for tensor in slots.tensors:
        tensor.zero_()
    tokens = drawn_tokens(shape, Content.PLAIN, max(lengths), weights, generator)
    calls: list[Call] = []
    for first in range(0, num_rows * num_sets, num_rows):
        parts = [
            Part(tuple(it[:length] for it in tokens), before, slots.zero if before == 0 else first + row, first + row)
            for row, length in enumerate(lengths)
        ]
        if phase is Phase.EXTEND:
            calls.append(slots.repeatable(run, parts))
            continue
        given = slots.given(parts)
        own = (it[: sum(lengths)] for it in given.tokens)
        out = given.tokens[0].new_empty(sum(lengths), sizes.num_value_heads, sizes.value_dim)
        calls.append(partial(run, *own, weights, first_rows(given.rows, num_rows), slots.state, out))
    return calls


def theirs(form: RecurrenceForm, lengths: Sequence[int], *, is_decode: bool) -> list[Call]:
    """Return the like of fla-core."""
    from fla.ops.utils import prepare_chunk_indices  # type: ignore[import-not-found]

    run, options = _peer(form, is_decode=is_decode)
    own, num_rows = SIZES[form], len(lengths)
    heads = own.num_value_heads
    is_delta = form in (RecurrenceForm.GATED_DELTA, RecurrenceForm.CHANNEL_DELTA)
    key_heads = own.num_key_heads if is_delta else heads
    calls: list[Call] = []
    has_borders = form is RecurrenceForm.GATED_DELTA and not is_decode
    for _ in range(max(2, SETS // num_rows) if is_decode else 2):
        sizes = (1, sum(lengths)) if has_borders else (num_rows, lengths[0])
        q, k, v = (
            torch.randn(*sizes, n, dim, device=DEVICE, dtype=torch.bfloat16)
            for n, dim in ((key_heads, own.key_dim), (key_heads, own.key_dim), (heads, own.value_dim))
        )
        given: dict[str, Any] = {"output_final_state": True, **options}
        given |= {"initial_state": torch.zeros(num_rows, heads, own.key_dim, own.value_dim, device=DEVICE)}
        if form is RecurrenceForm.CHANNEL_DELTA:
            given |= {"g": -torch.rand(*sizes, heads, own.key_dim, device=DEVICE)}
        else:
            given |= {"g": -torch.rand(*sizes, heads, device=DEVICE)}
        if is_delta:
            given |= {"beta": torch.rand(*sizes, heads, device=DEVICE).bfloat16()}
        if has_borders:
            borders = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0).int()
            given |= {"cu_seqlens": borders, "chunk_indices": prepare_chunk_indices(borders, 64)}
        calls.append(lambda q=q, k=k, v=v, given=given: run(q, k, v, **given))
    return calls


def _peer(form: RecurrenceForm, *, is_decode: bool) -> tuple[Callable[..., object], dict[str, Any]]:
    """fla-core's function of a form, and what it is told beside tokens and states."""
    if form is RecurrenceForm.GATED_DELTA:
        from fla.ops import gated_delta_rule as ops  # type: ignore[import-not-found]

        run = ops.fused_recurrent_gated_delta_rule if is_decode else ops.chunk_gated_delta_rule
        return run, {"use_qk_l2norm_in_kernel": True}
    if form is RecurrenceForm.CHANNEL_DELTA:
        from fla.ops import kda

        return (kda.fused_recurrent_kda if is_decode else kda.chunk_kda), {"use_qk_l2norm_in_kernel": True}
    from fla.ops import simple_gla

    return (simple_gla.fused_recurrent_simple_gla if is_decode else simple_gla.chunk_simple_gla), {}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--form", type=RecurrenceForm, default=RecurrenceForm.GATED_DELTA)
    args = parser.parse_args()
    form: RecurrenceForm = args.form
    has_peer, rows = importlib.util.find_spec("fla") is not None, []
    cells = [(Phase.EXTEND, lengths, Dtype.FP32) for lengths in PROMPTS]
    cells += [(Phase.DECODE, [1] * num_rows, dtype) for dtype in (Dtype.FP32, Dtype.BF16) for num_rows in ROWS]
    cells += [(Phase.VERIFY, [own] * num_rows, Dtype.FP32) for own in VERIFIED for num_rows in ROWS]
    for phase, lengths, dtype in cells:
        row: dict[str, Any] = {"phase": phase.value, "rows": len(lengths), "tokens": lengths[0], "state": dtype.value}
        row["us"] = timed_us(ours(form, lengths, phase, dtype))
        if phase is Phase.DECODE:
            shape = RecurrenceShape.of(SIZES[form], phase, Dtype.BF16, dtype, TokenRows.of(len(lengths)), form)
            row["tb_s"] = shape.hbm_bytes(len(lengths)) / row["us"] / 1e6
        if has_peer and dtype is Dtype.FP32 and phase is not Phase.VERIFY:
            row["fla_us"] = timed_us(theirs(form, lengths, is_decode=phase is Phase.DECODE))
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out is not None:
        head = {
            "what": f"times of the form {form.value}, us",
            "command": f"PYTHONPATH=. python trials/recurrence_times.py --form {form.value}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of_code(),
            "machine": machine_of(read_fingerprint(DEVICE), DEVICE),
        }
        args.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
