"""Both error rates of attention's checks, by the rule of today and by that of before, on the same outputs.

python trials/error_rates_before.py --out docs/benchmarks/error-rates-before-amd-epyc.json [--seeds N] [--time-limit S]

The rule of before took its limits from one draw of naive attention in the path's dtype: twice its largest error and 1.5
times its mean one on the rows that were drawn, and of inputs of unit variance a constant for the largest error and 1.5
times naive attention's largest error of a row as a share of the row. It had no input of many rows.

A trial is one kernel on all inputs of one shape: it is refused where any check fails. On a CPU every instruction set
and number of threads is a program of its own, as in `hallmark qualify --error-rates`, whose shapes, inputs, paths and
planted faults these are.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import keys_of, sequences_of, visible
from kernels.catalog import PATHS
from kernels.reference.oracle import attention_oracle
from kernels.system.device import read_fingerprint
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.measure.checks.attention_checks import check_path, run_case
from qualification.measure.checks.references import References
from qualification.measure.error_rates import settings_here, trial_shapes_of
from qualification.measure.faults.attention_faults import Fault, can_show, wrong_kernel
from qualification.measure.inputs.attention_inputs import Case, cases
from qualification.measure.trials.failures import KERNEL_ERRORS

CAPS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
FP32_ROUNDINGS, FP32_FLOOR, TINY = 4, 2e-5, 1e-30
UNIT_VARIANCE = frozenset({"ragged", "long", "window_edges"})
REPEATED = frozenset({"ragged", "long"})
KINDS = [*(dtype.value for dtype in Dtype), *(phase.value for phase in Phase)]
FAULTS = tuple(fault for fault in Fault if fault not in (Fault.NONE, Fault.ONE_TILE))
Rates = Counter[tuple[str, str, str, str]]  # what, dtype, phase, and what is counted


def naive(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, rows: Tensor) -> Tensor:
    """Attention of some rows [n, heads, head_dim], every step rounded to q's dtype."""
    out = torch.zeros(rows.numel(), *q.shape[1:], dtype=q.dtype, device=q.device)
    for sequence in sequences_of(batch):
        chosen = ((rows >= sequence.start) & (rows < sequence.end)).nonzero()[:, 0]
        if not chosen.numel() or not sequence.num_keys:
            continue
        keys, values = keys_of(k, batch, sequence).to(q.dtype), keys_of(v, batch, sequence).to(q.dtype)
        num_keys, num_kv_heads, head_dim = keys.shape
        queries = (q[rows[chosen]] * flags.scale).view(chosen.numel(), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (queries @ keys.permute(1, 2, 0)[:, None]).flatten(0, 1)  # [heads, rows, keys]
        if flags.softcap is not None:
            scores = flags.softcap * torch.tanh(scores / flags.softcap)
        positions = rows[chosen] - sequence.end + num_keys
        spans = None if flags.spans is None else flags.spans[rows[chosen]]
        seen = visible(positions, torch.arange(num_keys, device=q.device), flags, spans)
        scores = scores.masked_fill(~seen, float("-inf"))
        if flags.sinks is not None:
            sinks = flags.sinks.to(scores.dtype)[:, None, None].expand(-1, chosen.numel(), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_keys].masked_fill(~seen, 0.0)
        grouped = weights.view(num_kv_heads, -1, chosen.numel(), num_keys)
        out[chosen] = (grouped @ values.permute(1, 0, 2)[:, None]).flatten(0, 1).transpose(0, 1)
    return out


class Before:
    """The limits of before of one input, and whether an output is within them."""

    def __init__(self, case: Case) -> None:
        given = case.q, case.k, case.v, case.batch, case.flags
        self._case = case
        self._truth = attention_oracle(*given, rows=case.rows)
        self._rows = attention_oracle(*given, dtype=torch.float32) if case.name in UNIT_VARIANCE else None
        by_naive, dtype = naive(*given, case.rows), case.q.dtype
        eps, is_fp32 = torch.finfo(dtype).eps, dtype is torch.float32
        factor = 1.5 if case.flags.softcap is not None else 1.0
        error, size = (by_naive.double() - self._truth).abs(), self._truth.abs()
        rounding = eps * (FP32_ROUNDINGS if is_fp32 else 1)
        is_finite = bool(by_naive.isfinite().all())  # large fp16 logits overflow
        self._largest = 2 * factor * float(error.max()) + rounding * float(size.max()) if is_finite else CAPS[dtype]
        self._mean = 1.5 * factor * float(error.mean()) + rounding * float(size.mean()) if is_finite else CAPS[dtype]
        if self._rows is not None:
            floor = FP32_FLOOR if is_fp32 else 0.25 * eps
            self._row = 1.5 * factor * share_of_rows(by_naive, self._rows[case.rows]) + floor

    def accepts(self, run: RunAttention) -> bool:
        case = self._case
        out, num_beside = run_case(run, case)
        if num_beside or not out.isfinite().all():
            return False
        error = (out[case.rows].double() - self._truth).abs()
        is_right = float(error.max()) <= self._largest and float(error.mean()) <= self._mean
        if self._rows is not None:
            is_right &= float(error.max()) <= CAPS[out.dtype] and share_of_rows(out, self._rows) <= self._row
        return is_right and (case.name not in REPEATED or torch.equal(run_case(run, case)[0], out))


def share_of_rows(out: Tensor, truth: Tensor) -> float:
    """The largest error of a row and head, as a share of its length."""
    lengths = torch.linalg.vector_norm(truth, dim=-1).clamp(min=TINY)
    return float((torch.linalg.vector_norm(out.float() - truth, dim=-1) / lengths).max())


def measure(seeds: range, limit_s: float, device: torch.device, kinds: Container[str], *, has_faults: bool) -> Rates:
    """Measure the rates of shapes whose dtype and phase are both among `kinds`."""
    rates: Rates = Counter()
    fingerprint, deadline = read_fingerprint(device), time.monotonic() + limit_s
    shapes = [it for it in trial_shapes_of(device) if it.dtype.value in kinds and it.phase.value in kinds]
    for seed in seeds:
        for shape in Random(seed).sample(shapes, len(shapes)):
            if time.monotonic() > deadline:
                return rates
            inputs, references = list(cases(shape, device, seed=1000 * seed)), References()
            before = [Before(case) for case in inputs if case.name != "many_rows"]
            for what, run in kernels_of(shape, fingerprint, has_faults=has_faults):
                try:
                    by_now = all(check.is_passed for check in check_path(run, inputs, references))
                    by_before = all(each.accepts(run) for each in before)
                except KERNEL_ERRORS:
                    continue  # it refuses the input itself
                kind = what, shape.dtype.value, shape.phase.value
                rates[*kind, "trials"] += 1
                rates[*kind, "refused before"] += not by_before
                rates[*kind, "refused now"] += not by_now
    return rates


def kernels_of(shape: AttentionShape, fingerprint, *, has_faults: bool) -> Iterator[tuple[str, RunAttention]]:  # type: ignore[no-untyped-def]
    for path in PATHS:
        if path.run is not None and not path.rejects(shape, fingerprint):
            yield path.name, path.run
    for fault in FAULTS if has_faults else ():
        if can_show(fault, shape):
            yield fault.name, wrong_kernel(fault)


def rows_of(setting: str, rates: Rates) -> list[dict[str, object]]:
    kinds = sorted({key[:3] for key in rates})
    return [
        {"setting": setting, "what": what, "is_right": what not in Fault.__members__, "dtype": dtype, "phase": phase}
        | {
            name.replace(" ", "_"): rates[what, dtype, phase, name]
            for name in ("trials", "refused before", "refused now")
        }
        for what, dtype, phase in kinds
    ]


def on_this_cpu(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Rows of each instruction set that torch takes here; faults are tried under the first one."""
    for index, setting in enumerate(settings_here()):
        command = [sys.executable, __file__, "--out", "-", "--setting", setting.name, "--seeds", str(args.seeds)]
        command += ["--kinds", *args.kinds]
        command += ["--threads", str(setting.num_threads), "--time-limit", str(args.time_limit)]
        command += ["--faults"] if index == 0 and not args.no_faults else []
        environment = os.environ | setting.environment
        answer = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        if answer["capability"].lower() == setting.name.split(",")[0]:
            yield from answer["rows"]


def summary(rows: list[dict[str, object]]) -> Iterator[str]:
    """A line for each setting, dtype and phase of right kernels, and for each fault and dtype."""
    for is_right, names in ((True, ("setting", "dtype", "phase")), (False, ("what", "dtype"))):
        sums: dict[tuple[object, ...], Counter[str]] = {}
        for row in rows:
            if row["is_right"] is is_right:
                counts = sums.setdefault(tuple(row[name] for name in names), Counter())
                counts.update({name: row[name] for name in ("trials", "refused_before", "refused_now")})  # type: ignore[misc]
        for kind, of in sorted(sums.items()):
            label = "right" if is_right else "fault"
            counted = f"{of['trials']} trials, refused {of['refused_before']} before, {of['refused_now']} now"
            yield f"{label} {' '.join(map(str, kind))}: {counted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file; - for the answer of one setting")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds, of each setting")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="dtypes and phases (default: all)")
    parser.add_argument("--no-faults", action="store_true", help="right kernels alone")
    parser.add_argument("--commit", default="")
    for name in ("--setting", "--threads"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--faults", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device, seeds = torch.device("cuda" if torch.cuda.is_available() else "cpu"), range(1, 1 + args.seeds)
    if args.setting is not None:
        torch.set_num_threads(int(args.threads))
        rates = measure(seeds, args.time_limit, device, args.kinds, has_faults=args.faults)
        rows = rows_of(args.setting, rates)
        print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "rows": rows}))
        return
    if device.type == "cuda":
        rows = rows_of("cuda", measure(seeds, args.time_limit, device, args.kinds, has_faults=not args.no_faults))
    else:
        rows = list(on_this_cpu(args))
    command = f"python trials/error_rates_before.py {shlex.join(sys.argv[1:])}"
    head = {"what": "trials of right and wrong attention that the rule of before and that of today refuse"}
    head |= {"command": command, "commit": args.commit, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    head |= {
        "fingerprint": {
            k: v if v is None else str(getattr(v, "value", v)) for k, v in asdict(read_fingerprint(device)).items()
        }
    }  # type: ignore[dict-item]
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(args.out).write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]\n}}\n')
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
