"""What stands against the paths of a shape that none may serve."""

from kernels.path import Reject
from server.engine.messages import PlanRow

# Codes of a path that will never serve on this machine, or never this phase.
ELSEWHERE = frozenset({Reject.ARCH.value, Reject.LAYOUT.value})


def rejections_here(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """Of the paths of this machine and phase: on an H200 half of the catalog, on a CPU 2 of 11. Of all if none is."""
    here = {path: why for path, why in row.rejected.items() if ELSEWHERE.isdisjoint(code for code, _ in why)}
    return here or row.rejected
