"""The PTX of the attention kernels of a checkout: collected in a child process, and compared with another's.

What is collected depends on the checkout's `kernels` package alone: the pairs (of a path and a shape), the inputs and
the stand-in for a GPU are given by this checkout, see `qualification/measure/compiling/ptx_collect.py`.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from kernels.system.child_process import python_command
from kernels.system.triton_cache import content_digest

Pair = tuple[str, str]  # name of a path, shape

_COMPILED = ("gluon.", "triton.")  # how the names of the paths begin that Triton compiles

_OF_SOURCES = re.compile(r"\s*(\.(loc|file)\b|\$L__(tmp|func_begin|func_end)\d+:)")


class PtxError(ValueError):
    """Report that nothing can be collected or compared. The message names the place and the cause."""


class Order(msgspec.Struct, frozen=True):
    """The order to a collecting process. Shapes of one group share most of their kernels."""

    groups: list[list[Pair]]
    cache: str  # folder for Triton's cache, whose entries hold PTX in place of machine code
    num_processes: int


class Found(msgspec.Struct, frozen=True):
    """The result of one group."""

    variants: dict[str, str]  # a kernel with what is compiled in: the sha256 of its PTX
    failed: dict[str, str]  # a path and a shape: the error


class Collected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The PTX of one checkout, as it is written to a file."""

    triton: str
    ptxas: str
    pairs: list[Pair]  # that were asked for
    variants: dict[str, str]
    failed: dict[str, str]


class _Head(msgspec.Struct, frozen=True):
    triton: str
    ptxas: str
    kernels: str  # folder of the package that was imported


class _Row(msgspec.Struct, frozen=True):
    shape: str
    path: str


class _MatrixFile(msgspec.Struct, frozen=True):
    evidence: list[_Row]


def pairs_of(checkout: Path) -> set[Pair]:
    """Every pair that the checkout's matrices name and that Triton compiles. Raises PtxError."""
    found: set[Pair] = set()
    for path in (checkout / "qualification" / "matrices").rglob("*.json"):
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=_MatrixFile).evidence
        except (msgspec.MsgspecError, OSError) as error:
            raise PtxError(f"{path} names no pairs: {error}") from None
        found |= {(row.path, row.shape) for row in rows if row.path.startswith(_COMPILED)}
    return found


def selected_pairs(pairs: Iterable[Pair], paths: Sequence[str] | None, limit: int | None) -> list[Pair]:
    """Pairs in order: of these paths (None: of all), and at most `limit` of each."""
    by_path: dict[str, list[Pair]] = defaultdict(list)
    for pair in sorted(pairs):
        if paths is None or pair[0] in paths:
            by_path[pair[0]].append(pair)
    return [pair for of_path in by_path.values() for pair in of_path[:limit]]


def read_collected(path: Path) -> Collected:
    """Read a file of collected PTX. Raises PtxError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Collected)
    except (msgspec.MsgspecError, OSError) as error:
        raise PtxError(f"{path} is no file of collected PTX: {error}") from None


def collect(
    checkout: Path,
    pairs: Sequence[Pair],
    *,
    cache: Path,
    num_processes: int,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Collected:
    """Compile what these pairs launch, by the kernels of a checkout. Raises PtxError where they cannot be called.

    cache: holds a folder for Triton's cache for each content of `kernels`. Checkouts of different contents share none:
    Triton's key lacks values that a kernel takes as attributes of a module, and the code of a constexpr's properties.
    """
    sources = checkout / "kernels"
    if not (sources / "__init__.py").is_file():
        raise PtxError(f"{checkout} is no checkout: it has no kernels/__init__.py")
    groups = _groups(pairs)
    progress(0, len(groups), f"the kernels of {checkout}")
    order = msgspec.json.encode(Order(groups, str(cache.absolute() / content_digest(sources)[:32]), num_processes))
    variants: dict[str, str] = {}
    failed: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as orders,
        tempfile.TemporaryFile() as errors,
    ):
        orders.write(order)
        orders.seek(0)
        # The checkout's kernels are found first, and all else here.
        (Path(folder) / "kernels").symlink_to(sources.absolute())
        command = python_command(
            "qualification.measure.compiling.ptx_collect", under=("env", "-u", "TRITON_INTERPRET"), before=(folder,)
        )
        with subprocess.Popen(command, stdin=orders, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            for done, line in enumerate(process.stdout):
                found = msgspec.json.decode(line, type=Found)
                variants |= found.variants
                failed |= found.failed
                progress(done + 1, len(groups), f"{len(variants)} kernels of {checkout}")
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no error was written"]
            raise PtxError(f"the kernels of {checkout} cannot be called from here: {lines[-1]}")
    head = msgspec.json.decode(first, type=_Head)
    if head.kernels != str(sources.resolve()):
        raise PtxError(f"the kernels of {head.kernels} were compiled in place of {sources}")
    return Collected(head.triton, head.ptxas, list(pairs), dict(sorted(variants.items())), dict(sorted(failed.items())))


def _groups(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that differ in lengths alone are compiled by one process: they share most kernels."""
    groups: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for path, shape in pairs:
        kind = [word for word in shape.split() if not word.startswith(("q-", "c-"))]
        groups[path, *kind].append((path, shape))
    return list(groups.values())


def normalised(ptx: str) -> str:
    """PTX without comments and without what names a place in a source: `.loc`, its labels, and debug sections."""
    lines = []
    is_debug = False
    for line in ptx.splitlines():
        text = re.sub(r"\s*//.*", "", line)
        if text.lstrip().startswith(".section") and ".debug" in text:
            is_debug = not text.endswith("}")
        elif is_debug:
            is_debug = text.strip() != "}"
        elif text.strip() and not _OF_SOURCES.match(text):
            lines.append(text)
    return "\n".join(lines)


def differences(before: Collected, after: Collected) -> list[tuple[str, str]]:
    """("differs", "new" or "gone"; variant), sorted by variant."""
    found = []
    for variant in sorted(before.variants.keys() | after.variants.keys()):
        old, new = before.variants.get(variant), after.variants.get(variant)
        if old != new:
            found.append(("new" if old is None else "gone" if new is None else "differs", variant))
    return found
