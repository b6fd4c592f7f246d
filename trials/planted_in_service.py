"""Switches on each fault of served_faults/ in an engine that serves, and says which check sees it, after how many.

    python trials/planted_in_service.py --out docs/benchmarks/planted.json
    python trials/planted_in_service.py --only 'norm|slot' --reproducible

Four small models on a CPU, in fp32, one of which sees images, and the demo on two ranks; at last answers of an engine
of ordered paths are computed again by one whose kernels are right and sum otherwise. The first rows of each are of
right engines. Exits with 1 where a fault is seen by nothing, or anything is seen of a right engine.
"""

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench, which is not installed

from served_faults.attention_faults import ATTENTION_FAULTS
from served_faults.batch_faults import BATCH_FAULTS, OWN_BATCH_FAULTS
from served_faults.layer_faults import LAYER_FAULTS, OWN_LAYER_FAULTS
from served_faults.order_faults import ORDER_FAULTS, num_caught
from served_faults.plant import Fault, Kind, Model, Plant
from served_faults.product_faults import OWN_PRODUCT_FAULTS, PRODUCT_FAULTS
from served_faults.rank_faults import RANK_FAULTS, section_of
from served_faults.sampling_faults import OWN_SAMPLING_FAULTS, SAMPLING_FAULTS
from served_faults.served import Served
from served_faults.span_faults import SPAN_FAULTS, Images

from bench.machine import head_of_cpu

RIGHT = tuple(Fault("none", Kind.BATCH, Plant, model, most_answers=120) for model in Model)
FAULTS = (
    *ATTENTION_FAULTS, *PRODUCT_FAULTS, *BATCH_FAULTS, *SAMPLING_FAULTS, *LAYER_FAULTS,
    *OWN_PRODUCT_FAULTS, *OWN_BATCH_FAULTS, *OWN_SAMPLING_FAULTS, *OWN_LAYER_FAULTS,
)  # fmt: skip
RANKS, ORDER, SPANS = "ranks", "order of sums", "masks of images"
NUM_ANSWERS = 40  # that an engine of right kernels of another order computes again


def rows(only: str, folder: Path, *, reproducible: bool) -> Iterator[dict[str, Any]]:
    """Yield what was seen of each fault whose name has the expression."""
    served: dict[Model, Served] = {}
    for fault in (*RIGHT, *FAULTS):
        if not re.search(only, fault.name):
            continue
        if fault.model not in served:
            served[fault.model] = Served(fault.model, folder / fault.model.value, reproducible=reproducible)
        began = time.monotonic()
        seen = served[fault.model].look(fault)
        row = {"fault": fault.name, "kind": fault.kind.value, "model": fault.model.value, "caught": seen.is_caught}
        yield {**row, **asdict(seen), "seconds": round(time.monotonic() - began, 1)}
    for name, program in {"none": "ranks_follower", **RANK_FAULTS}.items():
        if re.search(only, name):
            began = time.monotonic()
            section = section_of(program, folder)
            row = {"fault": name, "kind": RANKS, "model": "demo", "caught": section is not None, "layers": section}
            yield {**row, "seconds": round(time.monotonic() - began, 1)}
    images = None
    for of_mask in SPAN_FAULTS:
        if re.search(only, of_mask.name) or re.search(only, SPANS):
            began = time.monotonic()
            images = images or Images(folder / "images")
            layers, shadow, checks = images.look(of_mask)
            row = {"fault": of_mask.name, "kind": SPANS, "model": "gemma4", "caught": (layers or shadow) is not None}
            row |= {"layers": layers, "shadow": shadow, "checks": {"shadow": checks}}
            yield {**row, "seconds": round(time.monotonic() - began, 1)}
    in_order = None
    for name, plant in ORDER_FAULTS.items():
        if re.search(only, name):
            began = time.monotonic()
            in_order = in_order or Served(Model.LLAMA, folder / "ordered", reproducible=True)
            differing, compared = num_caught(in_order, plant, NUM_ANSWERS)
            is_caught = differing > 0 if name == "none" else differing == compared
            row = {"fault": name, "kind": ORDER, "model": Model.LLAMA.value, "caught": is_caught}
            said = f"{differing} of {compared} answers"
            yield {**row, "replay": said, "seconds": round(time.monotonic() - began, 1)}


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    seen = {name: row.get(name) for name in ("layers", "shadow", "replay", "seals", "errors", "canary")}
    found = ", ".join(f"{name} {it}" for name, it in seen.items() if it is not None)
    return f"{row['kind']}: {row['fault']}: {found or 'seen by nothing'} ({row['seconds']} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of what was seen")
    parser.add_argument("--only", default="", help="a regular expression of names of faults")
    parser.add_argument("--reproducible", action="store_true", help="by ordered paths, answers compared to the bit")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what checks say of faults is in the result
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for row in rows(args.only, Path(folder), reproducible=args.reproducible):
            found.append(row)
            print(line_of(row), flush=True)
    wrong = [it for it in found if it["caught"] is (it["fault"] == "none")]
    planted = [it for it in found if it["fault"] != "none"]
    print(f"{sum(it['caught'] for it in planted)} of {len(planted)} faults were seen")
    if args.out is not None:
        command = "python trials/planted_in_service.py" + (" --reproducible" if args.reproducible else "")
        head = {
            **head_of_cpu(command),
            "dtype": "fp32",
            "faults": len(planted),
            "seen": sum(it["caught"] for it in planted),
        }
        args.out.write_text(json.dumps({**head, "items": found}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
