"""The kernels that a plan's evidence proves of the operators beside attention. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernels.operators import AnyShape, Operator
from kernels.path import AnyPath
from qualification.attest.promise import Promise, kernels_promised, promise_of
from qualification.decision.decision import Decision, Status
from qualification.evidence.evidence import Evidence

VALID = frozenset({Status.PROVEN, Status.PROVISIONAL})  # evidence that holds


@dataclass(frozen=True, slots=True)
class OperatorPromises:
    """What the decisions for one operator's shapes may launch: where evidence holds, and where it does not."""

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
        (held if decision.status in VALID else unheld)[promise_of(path, entry if is_of_it else None)] = None
    return {operator: OperatorPromises(tuple(held), tuple(unheld)) for operator, (held, unheld) in found.items()}
