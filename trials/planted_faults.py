"""Plants, on this machine, each fault that the qualification must catch, and says which it caught.

python trials/planted_faults.py --out docs/benchmarks/faults-nvidia-h200.json

Tests hold the same on a CPU with fakes where they help; here kernels, files and servers are those that serve. Exits
with 1 when a fault went by. The file is written after each fault, so that a run cut short leaves what it saw.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench, which is not installed
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is loaded: else its profiler writes two lines a call

from planted_crashes import failed_launch, fused, illegal_access
from planted_kernels import Found, Place, math_behind_a_mask, one_tile, slower, wrong_kernels
from planted_orders import changing_orders
from planted_products import wrong_products
from planted_servers import (
    degraded_upgrade,
    flipped_byte,
    lying_path,
    other_torch,
    qualify_demo,
    refused_upgrade,
    upgraded,
)

from bench.machine import commit_of_code
from kernels.vocabulary.shape import PLANNED_PHASES
from qualification.decision.decision import Policy


class Ledger:
    """Record on disk of what was seen so far."""

    def __init__(self, out: Path | None, place: Place) -> None:
        machine = asdict(place.fingerprint) | {"device": place.fingerprint.device.value}
        self._out = out
        self.items: list[dict[str, Any]] = []
        self._head = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python trials/planted_faults.py",
            "commit": commit_of_code(),
            "machine": machine,
        }

    def look(self, name: str, plant: Callable[[], Found]) -> None:
        began = time.perf_counter()
        try:
            is_caught, seen = plant()
        except Exception as error:  # the next fault is to be planted whatever became of this one
            traceback.print_exc()
            is_caught, seen = False, {"error": f"{type(error).__name__}: {error}"[:500]}
        took_s = round(time.perf_counter() - began, 2)
        self.items.append({"fault": name, "caught": is_caught, "took_s": took_s, **seen})
        print(f"{'PASS' if is_caught else 'FAIL'} {name} ({took_s} s) {json.dumps(seen)[:600]}", flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps({**self._head, "items": self.items}, indent=1) + "\n")


def upgrade(place: Place, ledger: Ledger) -> None:
    """A model without a proof."""
    with ExitStack() as stack:
        refused, degraded = (stack.enter_context(upgraded(place, it)) for it in (Policy.REFUSE, Policy.DEGRADE))
        ledger.look("head dim 320 under refuse", partial(refused_upgrade, refused))
        for name, plant in degraded_upgrade(degraded, place):
            ledger.look(name, plant)


def service(place: Place, ledger: Ledger) -> None:
    """Faults that break a server while it serves."""
    with fused(place) as (server, fuse):
        ledger.look("a kernel that cannot be launched, in service", partial(failed_launch, server, fuse))
        ledger.look("an illegal access, in service", partial(illegal_access, server, fuse))


def evidence(place: Place, ledger: Ledger) -> None:
    """Proofs that do not hold, and a path that lies."""
    ledger.look("another torch", partial(other_torch, place))
    ledger.look("a flipped byte in the matrix", partial(flipped_byte, place))
    for has_graphs in (False, True) if place.is_cuda else (False,):
        how = "in CUDA graphs" if has_graphs else "kernel by kernel"
        ledger.look(f"a path that runs another kernel, {how}", partial(lying_path, place, has_graphs=has_graphs))


def kernels(place: Place, ledger: Ledger) -> None:
    """Wrong, slow, and somebody else's."""
    ledger.look("one wrong tile in 10,000 of a real kernel", partial(one_tile, place))
    ledger.look("math behind grouped heads and a mask", partial(math_behind_a_mask, place))
    for name, plant in (*wrong_kernels(place), *wrong_products(place), *changing_orders(place)):
        ledger.look(name, plant)
    for phase in PLANNED_PHASES:
        ledger.look(f"a kernel of {phase.value} made 1.3 times slower", partial(slower, place, phase))


GROUPS = {group.__name__: group for group in (upgrade, service, evidence, kernels)}
NEED_MATRICES = {"service", "evidence"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON of what was seen")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--matrices", type=Path, help="of the bundled model, measured here before (default: now)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place.here(Path(folder), arguments.matrices)
        ledger = Ledger(arguments.out, place)
        if not place.matrices.exists() and NEED_MATRICES & set(arguments.groups):
            subprocess.run(qualify_demo(place), check=True)
        for name in arguments.groups:
            GROUPS[name](place, ledger)
    num_caught = sum(item["caught"] for item in ledger.items)
    print(f"{num_caught} of {len(ledger.items)} faults were caught", flush=True)
    return 0 if num_caught == len(ledger.items) else 1


if __name__ == "__main__":
    sys.exit(main())
