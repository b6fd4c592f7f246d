"""The files of a qualification run: what each model needs, what is known of it, and writing down what is new."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import AnyPath, Tier
from qualification.evidence.evidence import Evidence
from qualification.evidence.full_model import FullModel
from qualification.evidence.matrix import Key, load_matrix, save_matrix


@dataclass(frozen=True, slots=True)
class Target:
    """A model to be qualified."""

    name: str
    file: Path
    shapes: tuple[AnyShape, ...]


class Ledger:
    """Evidence by target. Every addition is on disk, whole, before the next measurement: an interrupt loses nothing."""

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        catalog: Sequence[AnyPath],
        fingerprint: Fingerprint,
        beside: Sequence[Path] = (),
    ) -> None:
        """Reads the files there are. Raises MatrixError for one that is not whole: it may be the only proof left.

        beside  files of other models, which are read alone

        What one file proves serves every target with the same shape. A file of another stack is measured anew, and
        replaced by the first proof; `replaced` holds its name and what differs.
        """
        self._targets = targets
        self._rows: dict[str, dict[Key, Evidence]] = {target.name: {} for target in targets}
        self._models: dict[str, FullModel | None] = {target.name: None for target in targets}
        self.known: dict[Key, Evidence] = {}  # valid on this machine, of all targets
        self.replaced: dict[str, tuple[str, ...]] = {}
        by_name = {path.name: path for path in catalog}
        for target in targets:
            if target.file.exists():
                self._read(target, by_name, fingerprint)
        for file in beside:
            if file.exists():
                for entry in load_matrix(file).evidence.values():
                    self._know(entry, by_name, fingerprint)
        for target in targets:
            self._share(target)

    def add(self, evidence: Evidence) -> None:
        """Write evidence into the file of each target with its shape. Raises OSError where a file cannot be written."""
        self.known[evidence.shape, evidence.path] = evidence
        for target in self._targets:
            if evidence.shape in target.shapes:
                self._rows[target.name][evidence.shape, evidence.path] = evidence
                save_matrix(target.file, self._rows[target.name].values(), self._models[target.name])

    def evidence_of(self, target: Target) -> list[Evidence]:
        """Return the target's valid evidence, in the order of its shapes."""
        wanted = {shape: index for index, shape in enumerate(target.shapes)}
        return sorted(
            (entry for entry in self.known.values() if entry.shape in wanted), key=lambda entry: wanted[entry.shape]
        )

    def _read(self, target: Target, by_name: Mapping[str, AnyPath], fingerprint: Fingerprint) -> None:
        matrix = load_matrix(target.file)
        for key, entry in matrix.evidence.items():
            other = entry.fingerprint.differing_fields(fingerprint)
            if other:
                self.replaced[target.name] = other
                return
            if entry.path not in by_name:
                continue  # no such path any more
            self._rows[target.name][key] = entry
            self._models[target.name] = matrix.model
            self._know(entry, by_name, fingerprint)

    def _know(self, entry: Evidence, by_name: Mapping[str, AnyPath], fingerprint: Fingerprint) -> None:
        """Keep what counts most of valid evidence of one shape and path: a failure, then the later one."""
        older = self.known.get((entry.shape, entry.path))
        is_newer = older is None or (not entry.is_proven, entry.at) > (not older.is_proven, older.at)
        is_valid = entry.path in by_name and not entry.differing_fields(by_name[entry.path], fingerprint)
        if is_valid and is_newer:
            self.known[entry.shape, entry.path] = entry

    def _share(self, target: Target) -> None:
        rows = self._rows[target.name]
        shared = {key: entry for key, entry in self.known.items() if key[0] in target.shapes}
        if shared.items() - rows.items():
            rows.update(shared)
            save_matrix(target.file, rows.values(), self._models[target.name])


def missing_of(
    shapes: Iterable[AnyShape],
    known: Mapping[Key, Evidence],
    *,
    paths: Sequence[AnyPath],
    fingerprint: Fingerprint,
    is_retrying: bool = False,
) -> list[tuple[AnyShape, AnyPath]]:
    """Return the pairs that have to be measured, each once: every able path without valid evidence.

    The first tier goes before the fallbacks, so that a run that is cut short has measured what serves. What failed is
    measured again only when `is_retrying`: on the same stack it would mostly fail again.
    """
    pairs = [
        (shape, path)
        for shape in dict.fromkeys(shapes)
        for path in paths
        if path.run is not None and not path.rejects(shape, fingerprint)
    ]

    def is_done(shape: AnyShape, path: AnyPath) -> bool:
        entry = known.get((shape, path.name))
        if entry is None or lacks_order(entry, path):
            return False
        return entry.is_proven or not is_retrying

    open_pairs = [(shape, path) for shape, path in pairs if not is_done(shape, path)]
    return sorted(open_pairs, key=lambda pair: pair[1].tier is Tier.FALLBACK)


def lacks_order(entry: Evidence, path: AnyPath) -> bool:
    """Return whether a proven path claims an order that this evidence has no check of."""
    if path.order is None or not entry.is_proven:
        return False
    return entry.invariance is None or not entry.invariance.is_of(path.order)
