"""The program that Nsight Compute looks into: `python -m qualification.counted_calls PAIRS.json`.

Makes the timed call of each (shape, path) once more between two calls of the CUDA profiler's API, a marker before it.
"""

import sys
from pathlib import Path

import msgspec
import torch

from kernels.catalog import path_named
from kernels.shape import AttentionShape
from qualification.qualify import timed_call
from qualification.shape_text import parse_shape


def main(file: Path) -> None:
    """What a call raises goes through: what is counted has been proven, so that nothing should."""
    device = torch.device("cuda")
    for text, name in msgspec.json.decode(file.read_bytes(), type=list[tuple[str, str]]):
        _count(parse_shape(text), name, device)
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
    main(Path(sys.argv[1]))
