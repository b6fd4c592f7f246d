"""Counts what shadow checks and replays say of right engines: small models of all families, in three dtypes, on a CPU.

    PYTHONPATH=.:tests python trials/false_alarms.py --time-limit 600 --out docs/benchmarks/false-alarms.json

Engines come in an order that the seed draws, until the time is over: each serves bursts of requests of every kind, all
steps are checked, and four answers of each burst are computed again. Exits with 1 where anything is called wrong.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from served_faults.plant import Fault, Kind, Plant
from served_faults.served import Service

from bench.machine import head_of_cpu
from server.settings import DtypeChoice
from support.engine.replayed import runner_of
from support.models.served_families import FAMILIES, family_model

DTYPES = (DtypeChoice.FP32, DtypeChoice.BF16, DtypeChoice.FP16)


def counted(family: str, dtype: DtypeChoice, folder: Path, num_answers: int, *, reproducible: bool) -> dict[str, Any]:
    """Serve a model until so many answers are compared; return what the checks have counted, and seen."""
    files = folder / f"{family} {dtype.value}"
    files.mkdir()
    family_model(files, family)
    runner = runner_of(files, folder / "cache", dtype, reproducible=reproducible)
    plant = Plant()
    fault = Fault("none", Kind.BATCH, Plant, most_answers=num_answers)
    service = Service(runner, plant, fault, is_exact=reproducible)
    service.run()
    seen = service.seen()
    return {"family": family, "dtype": dtype.value, "checks": seen.checks, "seen": list(seen.causes)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=24, help="that are computed again of each engine")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--reproducible", action="store_true", help="by ordered paths, answers compared to the bit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON of the counts")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, rows, total = time.monotonic(), [], Counter[str]()
    engines = list(product(FAMILIES, DTYPES))
    random.Random(args.seed).shuffle(engines)
    with TemporaryDirectory() as folder:
        for family, dtype in engines:
            if time.monotonic() - began > args.time_limit:
                break
            rows.append(counted(family, dtype, Path(folder), args.answers, reproducible=args.reproducible))
            total.update(rows[-1]["checks"])
            print(rows[-1], flush=True)
    num_wrong = sum(bool(row["seen"]) for row in rows)
    print(f"{len(rows)} of {len(engines)} engines, {dict(total)}, {num_wrong} called wrong")
    if args.out is not None:
        command = "python trials/false_alarms.py" + (" --reproducible" if args.reproducible else "")
        head = {
            **head_of_cpu(command),
            "engines": len(rows),
            "of": len(engines),
            "checks": dict(total),
            "called_wrong": num_wrong,
        }
        args.out.write_text(json.dumps({**head, "items": rows}, indent=1) + "\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
