"""Mixtures whose tiles change at two neighbouring numbers of tokens: each must be proven, by every path that may serve.

    python trials/odd_mixtures.py --out docs/benchmarks/odd-mixtures-nvidia-h200.json     # minutes on a GPU

There are 100 such pairs of (experts, active experts) with up to 256 and 16. Of each the inputs that stand on borders
are checked against fp64, with the sizes of a small mixture that people serve (granite-3.0-1b-a400m). The pairs are
spread over processes, since most of the time is the host's, which compiles. Needs torch, triton and numpy alone.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from kernels.experts.kinds import ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertsShape
from kernels.experts.tiles import token_counts
from kernels.fused.activation_kind import Activation
from kernels.system.device import read_fingerprint
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.checks.references import References
from qualification.measure.inputs.experts_inputs import experts_cases

MOST_EXPERTS, MOST_ACTIVE = 256, 16
SMALL_CPU, SMALL_GPU = (24, 20), (1024, 512)  # hidden size, and width of an expert
ROWS = (TokenRows.LE_16, TokenRows.LE_128)
SEED = 0


@dataclass(frozen=True, slots=True)
class Checked:
    """One path on one mixture. `failed`: the checks that it did not pass, or what it raised."""

    num_experts: int
    num_active: int
    rows: str
    path: str
    is_proven: bool
    worst: float  # of every_row, as a share of its limit
    failed: list[str]
    seconds: float


def neighbouring_borders(num_experts: int, num_active: int) -> bool:
    """Return whether a number of tokens is the last before one border, and the first behind another."""
    firsts = set(token_counts(num_experts, num_active, 4, None))
    return any(first + 1 in firsts for first in firsts)


def odd_pairs() -> list[tuple[int, int]]:
    """Return every (experts, active experts) with neighbouring borders; the borders do not depend on the machine."""
    return [
        (num_experts, num_active)
        for num_experts in range(1, MOST_EXPERTS + 1)
        for num_active in range(1, min(num_experts, MOST_ACTIVE) + 1)
        if neighbouring_borders(num_experts, num_active)
    ]


def checked(pair: tuple[int, int], device_name: str, dtype: Dtype) -> list[Checked]:
    """Check every path of this machine on one mixture."""
    device = torch.device(device_name)
    fingerprint = read_fingerprint(device)
    hidden, width = SMALL_CPU if device.type == "cpu" else SMALL_GPU
    found = []
    for rows in ROWS:
        shape = ExpertsShape(dtype, ExpertFormat.PLAIN, *pair, hidden, width, Activation.SILU, False, rows)
        references = References()
        for path in EXPERTS_PATHS:
            if path.run is None or path.rejects(shape, fingerprint):
                continue
            started_at, worst, failed = time.monotonic(), 0.0, []
            try:
                with one_thread():
                    checks = check_experts(path.run, experts_cases(shape, device, seed=SEED), references)
                failed = [f"{it.name} {it.measured:.3g} on {it.case} {it.where}" for it in checks if not it.is_passed]
                worst = next(it.measured for it in checks if it.name == "every_row")
            except (RuntimeError, ValueError) as error:
                failed = [f"{type(error).__name__}: {error}"[:300]]
            seconds = round(time.monotonic() - started_at, 2)
            found.append(Checked(*pair, rows.label, path.name, not failed, worst, failed, seconds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core, 12 at most)")
    parser.add_argument("--most", type=int, help="only so many pairs, of all sizes")
    args = parser.parse_args()
    dtype = Dtype.FP32 if args.device == "cpu" else Dtype.BF16
    started_at, pairs = time.monotonic(), odd_pairs()
    num_pairs, chosen = len(pairs), pairs[:: -(-len(pairs) // args.most)] if args.most else pairs
    found: list[Checked] = []
    jobs = args.jobs or min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # The largest first, so that no process is left with one at the end.
        futures = [pool.submit(checked, pair, args.device, dtype) for pair in reversed(chosen)]
        for done, future in enumerate(as_completed(futures), 1):
            found += future.result()
            print(f"{done} of {len(chosen)} pairs, {time.monotonic() - started_at:.0f} s", flush=True)
    found.sort(key=lambda it: (it.num_experts, it.num_active, it.rows, it.path))
    failed = [it for it in found if not it.is_proven]
    result = {
        "command": f"python trials/odd_mixtures.py --device {args.device}",
        "machine": read_fingerprint(torch.device(args.device)).values(),
        "dtype": dtype.value,
        "hidden_and_width": SMALL_CPU if args.device == "cpu" else SMALL_GPU,
        "num_pairs": num_pairs,
        "num_checked": len(chosen),
        "num_rows": len(found),
        "num_failed": len(failed),
        "seconds": round(time.monotonic() - started_at, 1),
        "jobs": jobs,
        "rows": [asdict(it) for it in found],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(chosen)} of {num_pairs} pairs, {len(found)} checks of a path, {len(failed)} failed: {args.out}")
    for it in failed[:10]:
        print(f"  {it}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
