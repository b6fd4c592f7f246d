"""What stands against the paths of a shape that none may serve."""

from kernels.path import Reject
from server.protocol.messages import PlanRow

# Codes of a path that will never serve on this machine, or never this phase.
_ELSEWHERE = frozenset({Reject.ARCH.value, Reject.LAYOUT.value})


def of_this_machine(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """Rejections of the paths of this machine and phase: on an H200 half of the catalog, on a CPU 2 of 11."""
    return {path: why for path, why in row.rejected.items() if _ELSEWHERE.isdisjoint(code for code, _ in why)}


def rejections_here(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """The same for a person, who wants a reason: those of all paths if none is of this machine."""
    return of_this_machine(row) or row.rejected
