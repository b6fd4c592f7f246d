"""The workers of `compile_ahead.py` beside this file: `python -m qualification.measure.compile_worker SEED PIPE...`.

Each reads a (shape, path) a line, makes every call that a qualification makes of it, and answers with a line.
"""

import sys
from functools import partial
from typing import BinaryIO

import msgspec
import torch

from kernels.catalog import path_named
from kernels.path import RunAttention
from kernels.shape import AttentionShape
from qualification.evidence.shape_text import parse_shape
from qualification.measure.checks import run_case
from qualification.measure.forked import fork_each, pipes_of
from qualification.measure.inputs import cases
from qualification.measure.qualify import KERNEL_ERRORS, timed_call

_SHARE_OF_MEMORY = 0.8  # of the device's, for all workers together


def serve(questions: BinaryIO, answers: BinaryIO, device: torch.device, *, seed: int, num_workers: int) -> None:
    """Until `questions` ends."""
    if device.type == "cuda":  # who asks for more fails, and the run compiles it: none takes another's memory
        torch.cuda.set_per_process_memory_fraction(_SHARE_OF_MEMORY / num_workers)
    for line in questions:
        text, name = msgspec.json.decode(line, type=tuple[str, str])
        run = path_named(name).run
        assert run is not None
        answers.write(b"done\n" if _call_all(parse_shape(text), run, device, seed) else b"failed\n")
        answers.flush()


def _call_all(shape: AttentionShape, run: RunAttention, device: torch.device, seed: int) -> bool:
    """Whether all calls could be made. Why not is for the run to meet and to say."""
    try:
        for case in cases(shape, device, seed=seed):
            run_case(run, case)
        call, _ = timed_call(shape, run, device, seed=seed)
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except KERNEL_ERRORS:
        return False
    return True


if __name__ == "__main__":
    pipes = pipes_of(sys.argv[2:])
    device = torch.device("cuda")
    fork_each(pipes, partial(serve, device=device, seed=int(sys.argv[1]), num_workers=len(pipes)))
