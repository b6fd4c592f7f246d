"""Compiles ahead on a GPU, then makes the calls itself; prints which kernels it had to compile, as JSON."""

import json
from typing import Any

import torch
import triton

from kernels.catalog import path_named
from kernels.system.child_process import python_command
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.compiling.processes import compiling_ahead
from qualification.measure.checks.attention_checks import run_case
from qualification.measure.compiling.compile_worker import calls_of
from qualification.measure.inputs.attention_inputs import cases
from qualification.measure.trials.trial import trial_of

SHORT, LONG = Bucket.LE_512, Bucket.LE_8K
PATHS = ("gluon.prefill.hopper", "gluon.decode.hopper", "triton.prefill", "triton.decode")


def shapes(path: str) -> list[AttentionShape]:
    phase = Phase.PREFILL if "prefill" in path else Phase.DECODE
    page_size = None if phase is Phase.PREFILL else 64
    return [
        AttentionShape(
            phase, Dtype.BF16, Dtype.BF16, 8, 2, 128, Bucket.LE_128 if page_size else bucket, bucket, page_size
        )
        for bucket in (SHORT, LONG)
    ]


def main() -> None:
    said: list[str] = []
    loaded: list[str] = []
    compiled: list[str] = []

    def note(metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (loaded if cache_hit else compiled).append(metadata.get("name", "?"))

    pairs = [(shape, path_named(name)) for name in PATHS for shape in shapes(name)]
    workers = python_command("qualification.measure.compiling.compile_worker", "0", "cuda")
    with compiling_ahead(calls_of(pairs), workers, num_processes=4) as wait:
        wait(said.append)
    triton.knobs.compilation.listener = note
    device = torch.device("cuda")
    for shape, path in pairs:
        assert path.run is not None
        for case in cases(shape, device, seed=0):
            run_case(path.run, case)
        trial_of(shape).timed_call(shape, path.run, device, seed=0)[0]()
    torch.cuda.synchronize()
    print(json.dumps({"loaded": loaded, "compiled": compiled, "said": said[-1]}))


if __name__ == "__main__":
    main()
