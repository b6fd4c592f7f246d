"""Kernels that a start will launch, compiled by other processes while it loads.

A program (`rehearsal.py`) makes this start's launches on a pretended GPU, and so finds the kernels that the plan needs;
its workers compile those that Triton's cache lacks. Nothing depends on it: what it misses is compiled where it is
launched. A file in Triton's cache says which entries a plan needs, so that a start that finds all of them there has
nothing found or compiled.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kernels.calls.launch import triton_version
from kernels.system.child_process import python_command
from kernels.system.device import num_cores
from kernels.system.whole_file import write_whole
from kernels.vocabulary.operators import AnyShape
from qualification.common.progress import TimeLeft
from qualification.compiling.processes import compiling_found
from qualification.decision.decision import Decision
from server.engine.startup.layers import code_digest
from server.engine.startup.plan import Progress
from server.engine.startup.subject import Subject
from server.settings import Settings

logger = logging.getLogger(__name__)

PROGRAM = "server.engine.startup.rehearsal"
_PATIENCE_S = 300.0  # without a kernel that is done: on a busy machine one took over a minute
_MOST_NAMED = 8  # kernels in a line of the log


class Order(msgspec.Struct, frozen=True):
    """The order to the program. decisions: (shape, path) of every shape; None where no path is left."""

    settings: Settings
    decisions: list[tuple[str, str | None]]
    gpu: dict[str, str | int]


def noted_compiles() -> list[str]:
    """Return a list that grows by the name of each kernel that this process compiles, and has not from the cache.

    Call it before the compile counter is installed, which passes on what it hears; behind it the list stays empty.
    """
    noted: list[str] = []
    if triton_version() is None:
        return noted
    from triton import knobs

    def note(src: object, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            noted.append(str(getattr(src, "name", "?")))

    if knobs.compilation.listener is None:
        knobs.compilation.listener = note
    return noted


def log_late(noted: Collection[str]) -> None:
    """Log which kernels the start has compiled itself, where others were compiled ahead."""
    if noted:
        names = ", ".join(sorted(noted)[:_MOST_NAMED])
        more = f" and {len(noted) - _MOST_NAMED} more" if len(noted) > _MOST_NAMED else ""
        logger.info("%d kernels were compiled by their first launch: %s%s", len(noted), names, more)


@contextmanager
def compiling_for(
    settings: Settings, subject: Subject, decisions: Collection[Decision[AnyShape]], progress: Progress
) -> Iterator[Callable[[], None]]:
    """Compile inside of the context what these decisions launch; gives a function that waits for it.

    Nothing is done without a GPU, where the settings want none, and where the cache has all of it.
    """
    jobs = num_cores() if settings.compile_jobs is None else settings.compile_jobs
    if not jobs or subject.device.type != "cuda" or triton_version() is None:
        yield lambda: None
        return
    from triton import knobs

    folder, begun = Path(knobs.cache.dir), time.monotonic()
    pairs = [(str(it.shape), it.path) for it in decisions]
    marker = folder / f"plan-{_key(settings, subject, pairs)}.json"
    if _is_warm(folder, marker):
        logger.info("Triton's cache has every kernel of the plan (%.2f s)", time.monotonic() - begun)
        yield lambda: None
        return
    # Imported here: it needs Triton.
    from qualification.compiling.pretended_gpu import GpuFacts

    order = Order(settings, pairs, msgspec.to_builtins(GpuFacts.read(subject.device)))
    # It pretends a GPU, and takes no memory of the one that is there.
    program = python_command(PROGRAM, environment=("CUDA_VISIBLE_DEVICES=",))
    with compiling_found(msgspec.json.encode(order), program, num_processes=jobs, patience_s=_PATIENCE_S) as wait:
        left = TimeLeft(time.monotonic)

        def tell(done: int, total: int) -> None:
            when = left(done, total)
            detail = f"{done}/{total} ({when}) kernels ahead of their launch" if total else "finding the plan's kernels"
            progress("compiling", detail)

        def wait_for_all() -> None:
            made = wait(tell)
            if made.found is None:
                logger.warning("no kernels are compiled ahead, the launches compile them: the rehearsal has failed")
                return
            count, known = len(made.found.calls), len(made.found.known)
            log = logger.info if made.is_whole else logger.warning
            log(
                "%d of %d kernels compiled ahead of their launches, in %.1f s; %d were in Triton's cache",
                made.num_made, count, time.monotonic() - begun, known,
            )  # fmt: skip
            if made.is_whole:
                _mark(marker, [*made.found.calls, *made.found.known])

        yield wait_for_all


def _key(settings: Settings, subject: Subject, pairs: list[tuple[str, str | None]]) -> str:
    """Return a digest of what the launches of a start depend on."""
    of_settings = [
        settings.cuda_graphs,
        settings.speculative_config,
        settings.kv_cache_tokens,
        settings.gpu_memory_utilization,
        settings.reproducible,
        settings.limit_images,
    ]
    of_model = [repr(subject.model), repr(subject.limits), subject.shard.world]
    parts = [code_digest(), subject.fingerprint.values(), pairs, of_settings, of_model]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _is_warm(folder: Path, marker: Path) -> bool:
    try:
        entries = msgspec.json.decode(marker.read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError):  # no start has needed just these
        return False
    return all((folder / it).is_file() for it in entries)


def _mark(marker: Path, entries: list[str]) -> None:
    try:
        write_whole(marker, msgspec.json.encode(entries))
    except OSError as error:
        logger.warning("%s cannot be written, so that the next start looks for the kernels again: %s", marker, error)
