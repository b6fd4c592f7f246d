"""`hallmark matrix`: show evidence, verify it, compare two bodies of it or put them together, and compare PTX."""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import AnyPath
from qualification.commands import ptx as ptx_command
from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command
from qualification.common.table import table
from qualification.evidence.evidence import SUITE, Evidence
from qualification.evidence.full_model import FullModel
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import (
    MATRICES,
    SCHEMA,
    Key,
    Matrix,
    MatrixError,
    load_matrix,
    matrix_files,
    save_matrix,
)
from qualification.evidence.summary import OUTCOMES, Changed, counts, outcomes, summary
from qualification.evidence.verdicts import SPEED_TOLERANCE, Side, differences, exit_code_of
from qualification.measure.compiling.ptx import PtxError


def add_parser(commands: Commands) -> None:
    """Add `hallmark matrix` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "matrix",
            "show, verify or compare evidence",
            "Read evidence: what was measured for each shape and path, whether it is whole and of this machine, "
            "and what differs between two bodies of it.",
            "hallmark matrix show",
            "hallmark matrix diff before/ after/",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark matrix`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    show_parser = add_command(
        actions,
        "show",
        "each shape's paths, the one that serves marked",
        "Show evidence: a summary of the files, then each shape's paths, the one that serves marked: by measured time, "
        "of products and sums over ranks in the catalog's order, by which a server chooses there.",
        "hallmark matrix show",
        "hallmark matrix show qualification/matrices/nvidia-h200 --summary",
    )
    show_parser.add_argument("--summary", action="store_true", help="the summary alone")
    verify_parser = add_command(
        actions,
        "verify",
        "is each file whole, and of this machine and these kernels?",
        "Check that each file is whole, in its GPU's folder, and measured on this machine with these kernels.",
        "hallmark matrix verify",
        "hallmark matrix verify evidence/ --files-only",
    )
    for place_parser in (show_parser, verify_parser):
        place_parser.add_argument(
            "place", type=Path, nargs="?", default=MATRICES, metavar="FILE|DIR", help="default: ours"
        )
    verify_parser.add_argument("--files-only", action="store_true", help="whole is enough: another machine's matrix")
    diff_parser = add_command(
        actions,
        "diff",
        "which shapes changed path, status, error or speed",
        "Compare two bodies of evidence shape by shape; the exit code says whether anything got worse.",
        "hallmark matrix diff before/ after/",
        "hallmark matrix diff qualification/matrices/nvidia-h200",
    )
    diff_parser.add_argument("before", type=Path, metavar="A", help="file or folder")
    diff_parser.add_argument("after", type=Path, nargs="?", metavar="B", help="default: this machine")
    diff_parser.add_argument(
        "--speed-tolerance", type=_share, default=SPEED_TOLERANCE, metavar="SHARE", help="of a time (0.05)"
    )
    diff_parser.add_argument("--cache-dir", type=Path, metavar="DIR", default=Path.home() / ".cache" / "hallmark")
    merge_parser = add_command(
        actions,
        "merge",
        "put evidence of several runs together",
        "Add the evidence of other folders to that of one, file by file. Of two measurements of one shape and path by "
        "the same kernel a failure counts, otherwise the later one.",
        "hallmark matrix merge qualification/matrices shard-1 shard-2",
    )
    merge_parser.add_argument("into", type=Path, metavar="DIR", help="holds <gpu>/<name>.json, or nothing yet")
    merge_parser.add_argument("others", type=Path, nargs="+", metavar="OTHER", help="folders of the same form")
    ptx_command.add_arguments(
        add_command(
            actions,
            "ptx",
            "do two checkouts compile the same kernels?",
            "Compile the kernels of two checkouts for sm_90, without a GPU, and compare the PTX.",
            "hallmark matrix ptx compare ../other-checkout",
        )
    )


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print, and return the exit code."""
    try:
        if args.action == "show":
            return show(args.place, is_brief=args.summary)
        if args.action == "verify":
            return verify(args.place, machine=None if args.files_only else this_machine())
        if args.action == "merge":
            return merge(args.into, args.others)
        return diff(args) if args.action == "diff" else ptx_command.run(args)
    except BrokenPipeError:
        raise  # the reader of the output has closed it: no fault of a file
    except (MatrixError, PtxError, OSError) as error:
        print(f"hallmark: {error}", file=sys.stderr)
        return ExitCode.ENVIRONMENT


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):  # nothing is slower than NaN allows
        raise argparse.ArgumentTypeError(f"must be a share such as 0.05, got {text}")
    return value


def this_machine() -> tuple[Fingerprint, Sequence[AnyPath]]:
    """The fingerprint that a server has here, and the catalog."""
    import torch  # comparing files does without it

    from kernels.catalog import ALL_PATHS
    from kernels.system.device import num_cores, read_fingerprint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return read_fingerprint(device, num_threads=num_cores()), ALL_PATHS


def changed_since(machine: tuple[Fingerprint, Sequence[AnyPath]]) -> Changed:
    """Name the fields that make evidence stale on this machine; `path` where the catalog no longer has the path."""
    fingerprint, catalog = machine
    by_name = {path.name: path for path in catalog}

    def changed(entry: Evidence) -> tuple[str, ...]:
        if entry.path not in by_name:
            return (*entry.fingerprint.differing_fields(fingerprint), "path")
        return entry.differing_fields(by_name[entry.path], fingerprint)

    return changed


def show(place: Path, *, is_brief: bool = False) -> ExitCode:
    """A summary of every file, refused ones by their reason; then, unless it is to be brief, each file's tables."""
    files = matrix_files(place)
    if not files:
        _print(f"{place} holds no matrix")
        return ExitCode.PASS
    matrices: dict[Path, Matrix] = {}
    refused: dict[Path, str] = {}
    for path in files:
        try:
            matrices[path] = load_matrix(path)
        except MatrixError as error:
            refused[path] = str(error)
    for line in _overview(matrices):
        _print(line)
    for path, reason in refused.items():
        _print(f"{path}: REFUSED: {reason}")
    for path, matrix in {} if is_brief else matrices.items():
        _print("")
        _print(f"{path}: {counts(matrix.evidence.values())}")
        for fingerprint in {entry.fingerprint for entry in matrix.evidence.values()}:
            _print(f"digest {matrix.digest}, schema {SCHEMA}, {fingerprint}")
        _print("")
        for line in summary(matrix.evidence.values()):
            _print(line)
    return ExitCode.ENVIRONMENT if refused else ExitCode.PASS


def _overview(matrices: Mapping[Path, Matrix]) -> list[str]:
    """A sentence on all files, and a line for each: how many shapes have a proven path, and a wanted one."""
    rows, totals = [], Counter[str]()
    for path, matrix in matrices.items():
        found = outcomes(matrix.evidence.values())
        totals += found
        gpus = sorted({entry.fingerprint.gpu or "?" for entry in matrix.evidence.values()})
        rows.append((path.stem, ", ".join(gpus), *(f"{found[name]}" for name in OUTCOMES), f"{found.total()}"))
    if not rows:
        return []
    words = ", ".join(f"{totals[name]} {name}" for name in OUTCOMES)
    lines = [f"{totals.total()} shapes in {len(rows)} file{'s' if len(rows) > 1 else ''}: {words}.", ""]
    return lines + table(("model", "GPU", *OUTCOMES, "shapes"), rows)


_ADVICE = {
    "STALE": "proves nothing on this machine and version, where a server measures again by itself under --on-unproven "
    "qualify. To renew the file run `hallmark qualify` with its model or preset on the GPU that it is of. To check "
    "files of another machine for being whole, add --files-only",
    "FOREIGN": "move the file into the folder of its GPU, where servers look for it",
    "REFUSED": "restore the file from git, or measure again with `hallmark qualify`; a server does not use it",
}


def verify(place: Path, *, machine: tuple[Fingerprint, Sequence[AnyPath]] | None) -> ExitCode:
    """A line a file. Without a machine only that they are whole, in the right folder and of this version's checks."""
    files = matrix_files(place)
    code, kinds = ExitCode.PASS, set[str]()
    for path in files:
        problem = _problem(path, is_in_folder=path.parent not in {place, place.parent}, machine=machine)
        _print(f"{path}: {problem or 'valid'}")
        code = ExitCode.ENVIRONMENT if problem else code
        kinds |= {kind for kind in _ADVICE if problem and problem.startswith(kind)}
    for kind, advice in _ADVICE.items():
        if kind in kinds:
            _print(f"{kind}: {advice}")
    if not files:
        _print(f"{place} holds no matrix: nothing was verified")
        return ExitCode.INCONCLUSIVE
    return code


def diff(args: argparse.Namespace) -> ExitCode:
    """Two bodies of evidence, or one and what this machine makes of it with what it has measured itself."""
    before = Side(_merged(args.before))
    if args.after is not None:
        after = Side(_merged(args.after))
    else:
        machine = this_machine()
        changed = changed_since(machine)
        own = _own_evidence(args.cache_dir, machine[0], before.evidence, changed)
        after = Side({**before.evidence, **own}, changed)
    for line in _stacks(before, after):
        _print(line)
    found = differences(before, after, speed_tolerance=args.speed_tolerance)
    if not found:
        _print("no difference: every shape has the same path, status, error and speed")
        return ExitCode.PASS
    rows = [(entry.harm.name.lower(), str(entry.shape), "; ".join(entry.details)) for entry in found]
    for line in table(("harm", "shape", "what changed"), rows):
        _print(line)
    code = exit_code_of(found)
    tally = Counter(entry.harm for entry in found)
    _print(", ".join(f"{tally[harm]} {harm.name.lower()}" for harm in sorted(tally)) + f" (exit {code.value})")
    return code


def merge(into: Path, others: Sequence[Path]) -> ExitCode:
    """Write each file of `others` into `into`. Raises MatrixError, having written nothing, if one is refused."""
    files: dict[Path, list[Matrix]] = {}
    for place in others:
        for path in matrix_files(place):
            files.setdefault(into / path.relative_to(place), []).append(load_matrix(path))
    if not files:
        raise MatrixError(f"{', '.join(map(str, others))}: no evidence is there")
    whole: dict[Path, tuple[list[Evidence], FullModel | None]] = {}
    for path, found in files.items():
        matrices = [load_matrix(path), *found] if path.exists() else found
        machines = {entry.fingerprint for matrix in matrices for entry in matrix.evidence.values()}
        if len(machines) > 1:
            raise MatrixError(f"{path.name} would hold evidence of {len(machines)} stacks, a file holds that of one")
        models = [matrix.model for matrix in matrices if matrix.model is not None]
        rows: dict[Key, Evidence] = {}
        for key, entry in (item for matrix in matrices for item in matrix.evidence.items()):
            older = rows.get(key)
            if older is None or _weight(entry, older) > _weight(older, entry):
                rows[key] = entry
        whole[path] = list(rows.values()), max(models, key=lambda model: model.at, default=None)
    for path, (evidence, model) in sorted(whole.items()):
        save_matrix(path, evidence, model)
        _print(f"{path}: {counts(evidence)}")
    return ExitCode.PASS


def _weight(entry: Evidence, other: Evidence) -> tuple[bool, str]:
    """A failure counts more than a success of the same source and checks, then the later measurement."""
    is_same = (entry.source_digest, entry.suite) == (other.source_digest, other.suite)
    return is_same and not entry.is_proven, entry.at


def _stacks(before: Side, after: Side) -> Iterable[str]:
    """Give a line for each fingerprint field that differs between the two sides."""
    old, new = ({entry.fingerprint for entry in side.evidence.values()} for side in (before, after))
    names = [field.name for field in fields(Fingerprint)]
    for name in names:
        values = [" and ".join(sorted({_text(getattr(it, name)) for it in stacks})) for stacks in (old, new)]
        if values[0] != values[1]:
            yield f"{name}: {values[0]} -> {values[1]}"


def _text(value: object) -> str:
    return str(value.value if isinstance(value, Device) else value)


def _problem(path: Path, *, is_in_folder: bool, machine: tuple[Fingerprint, Sequence[AnyPath]] | None) -> str | None:
    try:
        entries = list(load_matrix(path).evidence.values())
    except MatrixError as error:
        return f"REFUSED: {error}"
    gpu = entries[0].fingerprint.gpu if entries else ""
    if is_in_folder and path.parent.name != gpu_folder(gpu):
        return f"FOREIGN: measured on {gpu}, which belongs in {gpu_folder(gpu)}/"
    fields = Counter(_fields(entries, machine))
    if not fields:
        return None
    return "STALE: " + ", ".join(f"{field} ({count} of {len(entries)})" for field, count in fields.items())


def _fields(entries: Iterable[Evidence], machine: tuple[Fingerprint, Sequence[AnyPath]] | None) -> Iterable[str]:
    if machine is None:
        return ["suite" for entry in entries if entry.suite != SUITE]
    changed = changed_since(machine)
    return [field for entry in entries for field in changed(entry)]


def _merged(place: Path) -> dict[Key, Evidence]:
    """All evidence of a file or folder. Raises MatrixError where a file is refused, or they are of several GPUs.

    Of two entries a failure counts, then the later one, as when a server reads them.
    """
    merged: dict[Key, Evidence] = {}
    matrices: list[Matrix] = [load_matrix(path) for path in matrix_files(place)]
    gpus = sorted({entry.fingerprint.gpu for matrix in matrices for entry in matrix.evidence.values()})
    if not gpus:
        raise MatrixError(f"{place} holds no evidence")
    if len(gpus) > 1:
        raise MatrixError(f"{place} holds evidence of {len(gpus)} GPUs ({', '.join(gpus)}), one can be compared")
    for key, entry in (item for matrix in matrices for item in matrix.evidence.items()):
        older = merged.get(key)
        if older is None or (not entry.is_proven, entry.at) > (not older.is_proven, older.at):
            merged[key] = entry
    return merged


def _own_evidence(
    cache_dir: Path, fingerprint: Fingerprint, asked: Iterable[Key], changed: Changed
) -> dict[Key, Evidence]:
    """Return the evidence of this machine's servers for these shapes, as far as they would use it."""
    from qualification.measure.start_plan import own_file  # imports torch

    path = own_file(cache_dir, "evidence", fingerprint)
    own = load_matrix(path).evidence if path.exists() else {}
    shapes = {shape for shape, _ in asked}
    return {key: entry for key, entry in own.items() if key[0] in shapes and not changed(entry)}


def _print(line: str) -> None:
    print(line, flush=True)
