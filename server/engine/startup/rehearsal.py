"""The kernels that a start launches, found on a pretended GPU and compiled.

`python -m server.engine.startup.rehearsal PIPE...`, started by `ahead.py`: standard input has its order, and the
arguments are pipes of workers.

The start's own code runs as it will on the GPU, from loading dummy weights to capturing graphs, with tensors that have
no memory: Triton is asked for each kernel that the start will ask it for. Of layers that are alike one is launched.

Ranks of several sum by NCCL here, since other ways need the others' memory: kernels of those are compiled where they
are launched. So is a kernel whose launch follows one that cannot be rehearsed.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from kernels.collective.shape import CollectiveShape
from kernels.system.triton_cache import use_own_cache
from qualification.compiling.pretended_gpu import GpuFacts, PretendedTensors, pretend
from qualification.compiling.processes import Found, serve_found
from qualification.compiling.wanted import WantedKernels, compile_launchers, entry_of, name_of, source_of
from qualification.decision.decision import Pairs, ShapeT
from qualification.model.config import weight_bytes
from server.engine.execution.capture import Replayable
from server.engine.operators.decisions import decided
from server.engine.operators.linear import MeasuredProducts
from server.engine.startup.ahead import Order
from server.engine.startup.builder import Loaded, warm_engine
from server.engine.startup.subject import (
    Subject,
    decoder_of,
    dispatcher_of,
    head_of,
    load_own_tower,
    load_weights,
    read_subject,
)
from server.log import configure_logging
from server.model.ranks import Ranks
from server.settings import LoadFormat

logger = logging.getLogger(__name__)

_BY_NCCL = "nccl.collective"


class _Rehearsed:
    """Stands in for a CUDA graph."""

    def replay(self) -> None:
        pass


class RehearsedCapture:
    """Stands in for what records graphs. By default it makes no launch: the same step has run just before."""

    def __init__(self, _device: object, *, names_kernels: bool = True, launches: bool = False) -> None:  # noqa: ARG002
        self._launches = launches

    def __call__(self, work: Callable[[], None]) -> Replayable:
        if self._launches:
            work()
        return _Rehearsed()


def rehearse(order: Order) -> WantedKernels:
    """Return the kernels that the first rank of a start asks Triton for. An error ends the search, and is logged."""
    gpu = msgspec.convert(order.gpu, GpuFacts)
    pretend(gpu)
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
        setattr(dist, name, lambda *_, **__: None)
    subject = read_subject(order.settings)
    # As once the weights are loaded.
    pretend(
        msgspec.structs.replace(gpu, free_bytes=gpu.free_bytes - weight_bytes(subject.config, subject.limits.dtype))
    )
    wanted = WantedKernels()
    try:
        with wanted, PretendedTensors():
            _launch_all(order, subject)
    except Exception as error:  # whatever it is, the launches compile what is not found
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f" in {Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        logger.warning(
            "not all kernels are found before they are launched: %s: %s%s", type(error).__name__, error, place
        )
    return wanted


def _launch_all(order: Order, subject: Subject) -> None:
    settings = msgspec.structs.replace(order.settings, load_format=LoadFormat.DUMMY)
    decisions = decided(order.decisions)
    sums = [(str(it), _BY_NCCL) for it in decisions if isinstance(it, CollectiveShape)]
    decisions |= decided(sums)
    measured = MeasuredProducts.of(lambda *_: None)
    dispatcher = dispatcher_of(subject, decisions, measured, redecide=_decide_nothing)
    weights = load_weights(settings, subject)
    whole = decoder_of(subject, weights, dispatcher, Ranks(0, subject.shard.world))
    decoder = whole.with_layers_of_each_kind()
    head = head_of(subject, weights, dispatcher, decoder)
    tower = load_own_tower(settings, subject, dispatcher)
    loaded = Loaded(decoder, head, tower, dispatcher)
    warm_engine(settings, subject, loaded, None, _silent, dict, RehearsedCapture)


def _silent(_: str, __: str) -> None:
    """Report no progress."""


def _decide_nothing(shape: ShapeT, _: Pairs, __: Pairs) -> Any:
    raise RuntimeError(f"the launch of {shape} cannot be rehearsed")


def main() -> None:
    configure_logging()
    logging.getLogger().setLevel(logging.WARNING)  # what a start says is said by the start
    torch.set_num_threads(1)  # it computes nothing, and forks
    use_own_cache()
    from triton import knobs

    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # Gluon's first: one takes 2 to 6 s of a core, another one up to 1.8 s, and what is begun last ends last.
    wanted = sorted(rehearse(order).by_key.items(), key=lambda it: not source_of(it[1]).fn.is_gluon())
    by_entry = {entry_of(key, compile_fn): compile_fn for key, compile_fn in wanted}
    folder = Path(knobs.cache.dir)
    known = [it for it in by_entry if (folder / it).is_file()]

    def make(line: bytes) -> bool:
        compile_fn = by_entry[line.decode().strip()]
        try:
            kernel = compile_fn()
        except Exception as error:  # the launch meets it again, and says what it means there
            logger.warning("%s is not compiled ahead: %s: %s", name_of(compile_fn), type(error).__name__, error)
            return False
        try:
            compile_launchers(kernel)
        except Exception as error:  # likewise
            logger.debug("the launcher of %s is not compiled ahead: %s", name_of(compile_fn), error)
        return True

    serve_found(sys.argv[1:], Found([it for it in by_entry if it not in set(known)], known), make)


if __name__ == "__main__":
    main()
