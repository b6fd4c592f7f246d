"""The plan of a server: a decision for every shape it can meet, made (and where need be proven) before it is ready."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from kernels.catalog import ALL_PATHS
from kernels.system.shared_folder import only_writer
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import AnyPath
from qualification.decision.class_order import ClassOrder
from qualification.decision.decision import (
    Book,
    Decision,
    Pairs,
    Policy,
    ShapeT,
    Status,
    decide,
    evidence_for,
    path_standing,
)
from qualification.decision.orders import Known, choose_orders, unchecked_pairs
from qualification.evidence.anchors import class_of
from qualification.evidence.evidence import Evidence
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import MATRICES, Key, Matrix, MatrixError, load_matrices, load_matrix, save_matrix
from qualification.measure.qualify import Bench, Pair, Progress, qualify

logger = logging.getLogger(__name__)

RunQualification = Callable[..., None]  # as `qualify`


class MatrixVerdict(StrEnum):
    ABSENT = "absent"  # there is no matrix for this GPU
    VALID = "valid"  # every file is whole, and all that the plan uses of it was measured on this stack
    STALE = "stale"  # the files are whole, but for some shape of the plan they were measured on another stack
    INVALID = "invalid"  # a file was refused


class Redecide(Protocol):
    def __call__(self, shape: ShapeT, broken: Pairs, taken_out: Pairs, /) -> Decision[ShapeT]:
        """Decide a shape again without pairs that broke in service and pairs taken out by order. Measures nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for each shape, and the evidence it rests on."""

    decisions: Mapping[AnyShape, Decision[AnyShape]]
    evidence: Mapping[Key, Evidence]  # (shape, path) -> what decisions rest on, for every path of the plan's shapes
    matrix_digest: str | None
    matrix_verdict: MatrixVerdict
    redecide: Redecide
    orders: Mapping[str, ClassOrder] = field(default_factory=dict)  # by class of shapes; empty unless reproducible

    @property
    def order_problems(self) -> tuple[str, ...]:
        """A line for each class of shapes that no one order serves."""
        return tuple(order.problem for order in self.orders.values() if order.problem is not None)


def make_plan(
    shapes: Sequence[AnyShape],
    *,
    policy: Policy,
    fingerprint: Fingerprint,
    device: torch.device,
    matrix_dir: Path | None,
    cache_dir: Path,
    quarantined: Pairs,
    overridden: Pairs = frozenset(),
    progress: Progress,
    paths: Sequence[AnyPath] = ALL_PATHS,
    run_qualification: RunQualification = qualify,
    reproducible: bool = False,
    of_towers: Collection[AnyShape] = frozenset(),
) -> Plan:
    """Decide every shape by the reviewed matrix (None: the one that ships) and this machine's own evidence.

    Under QUALIFY what neither proves is measured now, and kept in `cache_dir` for the next start. A file that is not
    whole proves nothing: it is logged and, being the machine's own, measured anew. Under REFUSE and DEGRADE nothing is
    measured. Raises QualificationAborted and DeviceLost as `qualify` does.

    reproducible  whether all shapes in which a sequence can be computed are to be summed in one order, and a path may
                  serve only where it was shown to keep it. Paths of an order that turns out to lack one are followed by
                  those of the next
    of_towers     those of `shapes` that need no order: there each image is computed by itself, whatever else is served
    """
    ordered = [shape for shape in shapes if shape not in of_towers] if reproducible else []
    matrix = load_matrices(MATRICES if matrix_dir is None else matrix_dir, fingerprint)
    for problem in matrix.problems:
        logger.error("matrix refused: %s", problem.detail)
    if matrix_dir is not None and matrix.digest is None:
        wanted = matrix_dir / gpu_folder(fingerprint.gpu)
        logger.warning("--matrix %s proves nothing: %s holds no matrix of this machine", matrix_dir, wanted)
    cache = own_file(cache_dir, "evidence", fingerprint)
    own = _load_own(cache, fingerprint)
    known = Known(paths, fingerprint, Book(matrix, own), policy, quarantined, overridden)
    if policy is Policy.QUALIFY:
        bench = Bench(fingerprint, device, may_profile=device.type == "cpu", checks_orders=reproducible)
        recorder = _OwnEvidence(cache, own, fingerprint)

        def measure(pairs: list[Pair]) -> None:
            run_qualification(pairs, bench, progress=progress, on_evidence=recorder.add)

        if not reproducible or of_towers:
            found = of_towers if reproducible else shapes
            measure(
                missing_pairs(found, paths=paths, fingerprint=fingerprint, book=known.book, quarantined=quarantined)
            )
        known = replace(known, book=Book(matrix, recorder.evidence))
        if reproducible:
            known = _with_orders(ordered, known, recorder, measure)
    orders = choose_orders(ordered, known) if reproducible else {}
    decider = _Decider(known, orders, frozenset(of_towers))
    return Plan(
        decisions=MappingProxyType({shape: decider.decide(shape, quarantined, overridden) for shape in shapes}),
        evidence=MappingProxyType(decider.evidence_of(shapes)),
        matrix_digest=matrix.digest,
        matrix_verdict=_verdict(matrix, set(shapes), paths, fingerprint),
        redecide=decider.decide,
        orders=MappingProxyType(orders),
    )


def _with_orders(
    shapes: Sequence[AnyShape], known: Known, recorder: "_OwnEvidence", measure: Callable[[list[Pair]], None]
) -> Known:
    """Measure what the first order lacks, then, where that cannot serve, the next; each pair once."""
    asked: set[tuple[AnyShape, str]] = set()
    while True:
        found = unchecked_pairs(shapes, known)
        missing = [(shape, path) for shape, path in found if (shape, path.name) not in asked]
        if not missing:
            return known
        asked |= {(shape, path.name) for shape, path in missing}
        measure(missing)
        known = replace(known, book=Book(known.book.reviewed, recorder.evidence))


@dataclass(frozen=True, slots=True)
class _Decider:
    """Decides by what is known, as often as it is asked.

    An order that was chosen stays while the server runs: the keys and values in its cache are of that order.
    """

    known: Known
    orders: Mapping[str, ClassOrder]  # by class of shapes; empty unless one is asked for
    unordered: frozenset[AnyShape] = frozenset()  # that need none even then

    def decide(self, shape: ShapeT, broken: Pairs, taken_out: Pairs) -> Decision[ShapeT]:
        return decide(
            shape,
            paths=self.known.paths,
            fingerprint=self.known.fingerprint,
            book=self.known.book,
            quarantined=broken,
            policy=self.known.policy,
            overridden=taken_out,
            order=self.orders[class_of(shape)] if self.orders and shape not in self.unordered else None,
        )

    def evidence_of(self, shapes: Iterable[AnyShape]) -> dict[Key, Evidence]:
        """Return the evidence that decisions rest on, where there is any."""
        found = {}
        for shape, path in product(dict.fromkeys(shapes), self.known.paths):
            entry = evidence_for(
                path,
                shape,
                fingerprint=self.known.fingerprint,
                book=self.known.book,
                is_ordered=bool(self.orders) and shape not in self.unordered,
            )
            if entry is not None:
                found[shape, path.name] = entry
        return found


def missing_pairs(
    shapes: Iterable[AnyShape],
    *,
    paths: Sequence[AnyPath],
    fingerprint: Fingerprint,
    book: Book,
    quarantined: Pairs,
) -> list[Pair]:
    """Return, for each shape whose first choice is not proven, every able path without valid evidence.

    A path that failed here is not measured again: the same stack would fail again.
    """
    pairs: list[Pair] = []
    for shape in shapes:
        decision = decide(
            shape,
            paths=paths,
            fingerprint=fingerprint,
            book=book,
            quarantined=quarantined,
            policy=Policy.QUALIFY,
        )
        if not decision.is_fallback:
            continue
        for path in paths:
            if path.is_for_order:
                continue
            status, _ = path_standing(path, shape, fingerprint=fingerprint, book=book)
            is_able = path.run is not None and path.refused is None and not path.rejects(shape, fingerprint)
            is_known = status.is_valid or status is Status.FAILED
            if is_able and not is_known and (path.name, str(shape)) not in quarantined:
                pairs.append((shape, path))
    return pairs


def own_file(cache_dir: Path, what: str, fingerprint: Fingerprint) -> Path:
    """Return the file for this machine's next start, for as long as nothing of its stack changes."""
    return cache_dir / f"{what}-{hashlib.sha256(str(fingerprint).encode()).hexdigest()[:16]}.json"


class _OwnEvidence:
    """The machine's own evidence as it grows; on disk after each addition, so an interrupt loses nothing proven."""

    def __init__(self, cache: Path, known: Mapping[Key, Evidence], fingerprint: Fingerprint) -> None:
        self._cache = cache
        self._fingerprint = fingerprint
        self._lasting = dict(known)  # what is or was on disk, older than what is added
        self._added: dict[Key, Evidence] = {}
        self._has_warned = False

    @property
    def evidence(self) -> Mapping[Key, Evidence]:
        return self._lasting | self._added

    def add(self, evidence: Evidence) -> None:
        """Keep it beside what servers that share the folder have kept meanwhile."""
        self._added[evidence.shape, evidence.path] = evidence
        # What a path raised may have had a passing cause (memory): it counts for this start and is tried at the next.
        if evidence.failure is not None:
            return
        added = {key: entry for key, entry in self._added.items() if entry.failure is None}
        try:
            with only_writer(self._cache.parent):
                with suppress(MatrixError):  # none yet, or broken since the start: it is written anew
                    self._lasting |= _read_own(self._cache, self._fingerprint)  # 200 entries take 6 ms
                save_matrix(self._cache, (self._lasting | added).values())
        except OSError as error:
            if self._has_warned:  # once, not for each of 40 pairs
                return
            self._has_warned = True
            # a full disk's error names no file
            folder, why = self._cache.parent, error.strerror or error
            logger.warning("the evidence cannot be kept for the next start in %s: %s", folder, why)


def _load_own(cache: Path, fingerprint: Fingerprint) -> Mapping[Key, Evidence]:
    if not cache.exists():
        return {}
    try:
        return _read_own(cache, fingerprint)
    except MatrixError as error:
        logger.warning("this machine's own evidence is refused and measured again: %s", error)
        return {}


def _read_own(cache: Path, fingerprint: Fingerprint) -> Mapping[Key, Evidence]:
    """Read the machine's own file. Raises MatrixError, also for a file of another stack."""
    found = load_matrix(cache).evidence
    if any(entry.fingerprint != fingerprint for entry in found.values()):
        raise MatrixError(f"{cache.name} was measured on another stack")
    return found


def _verdict(
    matrix: Matrix, shapes: set[AnyShape], paths: Sequence[AnyPath], fingerprint: Fingerprint
) -> MatrixVerdict:
    if matrix.problems:
        return MatrixVerdict.INVALID
    if matrix.digest is None:
        return MatrixVerdict.ABSENT
    by_name = {path.name: path for path in paths}
    used = [entry for (shape, name), entry in matrix.evidence.items() if shape in shapes and name in by_name]
    is_stale = any(entry.differing_fields(by_name[entry.path], fingerprint) for entry in used)
    return MatrixVerdict.STALE if is_stale else MatrixVerdict.VALID
