"""The kernels that a plan's evidence proves of the operators beside attention, and whether a step ran them.

Imports no torch.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kernels.identity.known_kernels import NAMED, OPERATORS
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from qualification.attest.promise import Promise, kernels_promised, promise_of
from qualification.decision.decision import Decision
from qualification.evidence.evidence import Evidence


@dataclass(frozen=True, slots=True)
class OperatorPromises:
    """Kernels that the decisions for one operator's shapes may launch, with and without evidence that holds."""

    held: tuple[Promise, ...]
    unheld: tuple[Promise, ...]

    def proven(self, seen: Iterable[str]) -> frozenset[str]:
        """Return the short names of kernels that are proven wherever the plan may launch them.

        A step's record does not say for which shape a kernel was launched. So a path that serves a shape without any
        names of its own proves none for another shape.
        """
        seen = tuple(seen)
        nameless = {promise.path for promise in self.unheld if not promise.is_measured}
        held = (promise for promise in self.held if promise.path not in nameless)
        return kernels_promised(held, seen) - kernels_promised(self.unheld, seen)


def operator_promises(
    decisions: Iterable[Decision[AnyShape]],
    evidence: Mapping[tuple[AnyShape, str], Evidence],
    paths: Iterable[AnyPath],
) -> dict[Operator, OperatorPromises]:
    """Return the promises of each operator but attention, whose choices are known call by call."""
    of_name = {path.name: path for path in paths}
    found: dict[Operator, tuple[dict[Promise, None], dict[Promise, None]]] = {}
    for decision in decisions:
        path = None if decision.path is None else of_name[decision.path]
        if path is None or path.operator is Operator.ATTENTION:
            continue
        entry = evidence.get((decision.shape, path.name))
        is_of_it = entry is not None and entry.source_digest == path.source_digest
        held, unheld = found.setdefault(path.operator, ({}, {}))
        (held if decision.status.is_valid else unheld)[promise_of(path, entry if is_of_it else None)] = None
    return {operator: OperatorPromises(tuple(held), tuple(unheld)) for operator, (held, unheld) in found.items()}


@dataclass(frozen=True, slots=True)
class OperatorMismatch:
    """Kernels of a step that are not as promised of an operator. `path`: to blame; None where that is unknown."""

    path: str | None
    operator: Operator
    detail: str


def operator_mismatches(promised: Iterable[tuple[AnyPath, Promise]], seen: Collection[str]) -> list[OperatorMismatch]:
    """Compare the kernels of a step with the promises of the paths that serve its products.

    Only kernels of this project's own are compared: each of a measured promise ran, and none ran without a promise.
    Which kernels a library launches depends on more than a shape; what of theirs no evidence names is reported as time
    that is not proven.
    """
    promised = list(promised)
    found: dict[str, OperatorMismatch] = {}
    for path, promise in promised:
        missing = sorted({name for name in promise.always if _is_own(name)} - set(seen))
        if missing:
            detail = f"{path.name} did not launch {', '.join(missing)}"
            found.setdefault(path.name, OperatorMismatch(path.name, path.operator, detail))
    named = {it.value: it for it in EVERY_OPERATOR}
    for operator, patterns in OPERATORS:
        of_operator = [(path, promise) for path, promise in promised if path.operator.value == operator]
        if not of_operator:
            continue
        known = frozenset[str]().union(*(promise.names for _, promise in of_operator))
        loose = [marker for _, promise in of_operator if not promise.is_measured for marker in promise.markers]
        foreign = [
            name
            for name in sorted(seen)
            if _is_own(name)
            and name not in known
            and not any(name in it.patterns for it in NAMED)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
            and not any(marker in name for marker in loose)
        ]
        if foreign:
            detail = f"{', '.join(foreign)} ran, which no path of {operator} promised"
            blamed = next((path.name for path, promise in of_operator if any(map(_is_own, promise.names))), None)
            found.setdefault(f"{operator}: {detail}", OperatorMismatch(blamed, named[operator], detail))
    return list(found.values())


def _is_own(kernel: str) -> bool:
    return kernel.startswith("hallmark_")
