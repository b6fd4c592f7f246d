"""The calls that a qualification compiles ahead, in a process of their own.

`python -m qualification.measure.compiling.compile_worker SEED DEVICE PIPE...`

A call is a (shape, path) pair: a worker launches every kernel that a qualification launches for it.
"""

import sys
from functools import partial

import msgspec
import torch

from kernels.catalog import any_path_named
from qualification.evidence.shape_text import parse_shape
from qualification.measure.compiling.compile_ahead import serve_calls
from qualification.measure.trials.failures import KERNEL_ERRORS
from qualification.measure.trials.trial import trial_of

_SHARE_OF_MEMORY = 0.8  # of the GPU's, for all workers together


def share_gpu(num_workers: int) -> None:
    """Limit the GPU memory of this worker: a call that needs more fails, and takes none from the other workers."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(_SHARE_OF_MEMORY / num_workers)


def make_call(line: bytes, device: torch.device, seed: int) -> bool:
    """Return whether every launch succeeded. The run meets the error again, and reports it."""
    text, name = msgspec.json.decode(line, type=tuple[str, str])
    shape, run = parse_shape(text), any_path_named(name).run
    assert run is not None
    trial = trial_of(shape)
    try:
        for call in trial.calls(shape, run, device, seed=seed):
            call()
        timed, _ = trial.timed_call(shape, run, device, seed=seed)
        timed()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except KERNEL_ERRORS:
        return False
    return True


if __name__ == "__main__":
    serve_calls(sys.argv[3:], partial(make_call, device=torch.device(sys.argv[2]), seed=int(sys.argv[1])), share_gpu)
