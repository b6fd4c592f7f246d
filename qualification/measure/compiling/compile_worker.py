"""The calls that a qualification compiles ahead, in a process of their own.

`python -m qualification.measure.compiling.compile_worker SEED DEVICE PIPE...`

A call is a (shape, path) pair: a worker launches every kernel that a qualification launches for it.
"""

import sys
from collections.abc import Hashable, Iterable
from functools import partial

import msgspec
import torch

from kernels.catalog import any_path_named
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import AttentionShape
from kernels.vocabulary.value_shape import values_of
from qualification.compiling.processes import alternated, serve_calls
from qualification.evidence.shape_text import parse_shape
from qualification.measure.trials.failures import KERNEL_ERRORS
from qualification.measure.trials.trial import trial_of

Pair = tuple[AnyShape, AnyPath]

_SHARE_OF_MEMORY = 0.8  # of the GPU's, for all workers together


def calls_of(pairs: Iterable[Pair]) -> list[bytes]:
    """Return the pairs that Triton compiles as calls of this program, in the order for workers."""

    def kind(pair: Pair) -> Hashable:
        shape, path = pair
        if not isinstance(shape, AttentionShape):
            return (path.name, shape.kind)
        flags = (shape.window is None, shape.softcap is None, shape.sinks, shape.mask, shape.dtype, shape.kv_dtype)
        return (path.name, shape.num_heads, shape.num_kv_heads, shape.head_dim, values_of(shape), *flags)

    # Not of collectives, whose calls wait for other ranks.
    compiled = [pair for pair in pairs if pair[1].limits.needs_triton and pair[1].operator is not Operator.COLLECTIVE]
    return [msgspec.json.encode((str(shape), path.name)) for shape, path in alternated(compiled, kind)]


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
