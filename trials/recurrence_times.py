"""Time `triton.recurrence` on a GPU, and fla-core where it is installed, in CUDA graphs.

PYTHONPATH=. python trials/recurrence_times.py [--out docs/benchmarks/recurrence-nvidia-h200.json]

Sizes of Qwen3.5-35B-A3B: 16 key heads, 32 value heads of 128, convolution of 4. Ours holds convolution, norms and
gates; fla-core's has the norms alone. A graph holds several calls on other slots each, 256 in all, so that no state is
in the L2; the median of its replays counts. In decode, and where tokens are verified, half a chunk is behind each row's
border, and no row is padding: those of the server have no token.
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
from kernels.recurrence.portable.launch import run_recurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.system.device import read_fingerprint
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.recurrence_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.state_slots import Part, recurrence_slots

Call = Callable[[], object]
SIZES = RecurrenceSizes(16, 32, 128, 128, 4)
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


def ours(lengths: Sequence[int], phase: Phase, state_dtype: Dtype) -> list[Call]:
    """Return calls of rows of so many tokens."""
    shape = RecurrenceShape.of(SIZES, phase, Dtype.BF16, state_dtype, TokenRows.of(sum(lengths)))
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
            calls.append(slots.repeatable(run_recurrence, parts))
            continue
        given = slots.given(parts)
        own = (it[: sum(lengths)] for it in given.tokens)
        out = given.tokens[0].new_empty(sum(lengths), SIZES.num_value_heads, SIZES.value_dim)
        calls.append(partial(run_recurrence, *own, weights, first_rows(given.rows, num_rows), slots.state, out))
    return calls


def theirs(lengths: Sequence[int], *, is_decode: bool) -> list[Call]:
    """Return the like of fla-core."""
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )
    from fla.ops.utils import prepare_chunk_indices  # type: ignore[import-not-found]

    heads, num_rows = SIZES.num_value_heads, len(lengths)
    calls: list[Call] = []
    for _ in range(max(2, SETS // num_rows) if is_decode else 2):
        sizes = (num_rows, 1) if is_decode else (1, sum(lengths))
        q, k, v = (torch.randn(*sizes, n, 128, device=DEVICE, dtype=torch.bfloat16) for n in (16, 16, heads))
        g, beta = -torch.rand(*sizes, heads, device=DEVICE), torch.rand(*sizes, heads, device=DEVICE)
        given: dict[str, Any] = {"g": g, "beta": beta.bfloat16(), "output_final_state": True}
        given |= {"initial_state": torch.zeros(num_rows, heads, 128, 128, device=DEVICE)}
        given |= {"use_qk_l2norm_in_kernel": True}
        if not is_decode:
            borders = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0).int()
            given |= {"cu_seqlens": borders, "chunk_indices": prepare_chunk_indices(borders, 64)}
        run = fused_recurrent_gated_delta_rule if is_decode else chunk_gated_delta_rule
        calls.append(lambda run=run, q=q, k=k, v=v, given=given: run(q, k, v, **given))  # type: ignore[misc]
    return calls


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    has_peer, rows = importlib.util.find_spec("fla") is not None, []
    cells = [(Phase.EXTEND, lengths, Dtype.FP32) for lengths in PROMPTS]
    cells += [(Phase.DECODE, [1] * num_rows, dtype) for dtype in (Dtype.FP32, Dtype.BF16) for num_rows in ROWS]
    cells += [(Phase.VERIFY, [own] * num_rows, Dtype.FP32) for own in VERIFIED for num_rows in ROWS]
    for phase, lengths, dtype in cells:
        row: dict[str, Any] = {"phase": phase.value, "rows": len(lengths), "tokens": lengths[0], "state": dtype.value}
        row["us"] = timed_us(ours(lengths, phase, dtype))
        if phase is Phase.DECODE:
            shape = RecurrenceShape.of(SIZES, phase, Dtype.BF16, dtype, TokenRows.of(len(lengths)))
            row["tb_s"] = shape.hbm_bytes(len(lengths)) / row["us"] / 1e6
        if has_peer and dtype is Dtype.FP32 and phase is not Phase.VERIFY:
            row["fla_us"] = timed_us(theirs(lengths, is_decode=phase is Phase.DECODE))
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out is not None:
        head = {
            "what": "times of the gated delta rule, us",
            "command": "PYTHONPATH=. python trials/recurrence_times.py",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of_code(),
            "machine": machine_of(read_fingerprint(DEVICE), DEVICE),
        }
        args.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
