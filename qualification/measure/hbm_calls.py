"""The program that Nsight Compute looks into: `python -m qualification.measure.hbm_calls PAIRS.json SECONDS`.

Makes the timed call of each (shape, path) once more between two calls of the CUDA profiler's API, a marker before it;
none after so many seconds. A line before and after each says how far it is.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import torch

from kernels.catalog import path_named
from kernels.shape import AttentionShape
from qualification.evidence.shape_text import parse_shape
from qualification.measure.hbm_counters import BEGUN, COUNTED, STARTED
from qualification.measure.qualify import timed_call


def main(file: Path, limit_s: float) -> None:
    """What a call raises goes through: what is counted has been proven, so that nothing should."""
    print(f"{STARTED}{os.getpid()}", flush=True)
    device = torch.device("cuda")
    began = time.monotonic()
    pairs = msgspec.json.decode(file.read_bytes(), type=list[tuple[str, str]])
    for number, (text, name) in enumerate(pairs, 1):
        if time.monotonic() - began > limit_s:
            return
        print(f"{BEGUN}{number} of {len(pairs)}, {name}: {text}", flush=True)
        _count(parse_shape(text), name, device)
        print(COUNTED, flush=True)
        torch.cuda.empty_cache()


def _count(shape: AttentionShape, name: str, device: torch.device) -> None:
    run = path_named(name).run
    assert run is not None
    call, _ = timed_call(shape, run, device, seed=0)
    call()  # what is compiled and loaded once
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    cudart.cudaProfilerStart()
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    cudart.cudaProfilerStop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
