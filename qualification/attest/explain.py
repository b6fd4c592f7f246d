"""Sort the time of a forward pass by what is known of the kernels that took it. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from kernels.identity.known_kernels import NAMED, OPERATORS
from qualification.common.kernel_names import plain_name, short_name

_KEPT_NAMES = 8  # of a class, the longest times first
_NAME_LENGTH = 120  # of a name in a report: templates go to thousands


class TimeClass(Enum):
    """Class of a kernel by what is known of it. The first two explain its time."""

    EVIDENCE = "evidence"  # an operator's, and named by evidence that holds
    NAMED = "named"  # small, and in the list of those that need no proof
    UNPROVEN = "unproven"  # an operator's, without evidence that holds
    UNEXPLAINED = "unexplained"  # no list names it


@dataclass(frozen=True, slots=True)
class Explanation:
    """Time of a forward pass on its device: seconds by class, and of two classes the longest names."""

    seconds: Mapping[TimeClass, float]
    unproven: Mapping[str, float]
    unexplained: Mapping[str, float]

    @property
    def share(self) -> float:
        """Return the explained share of the time, 0 to 1."""
        total = sum(self.seconds.values())
        return (self.seconds[TimeClass.EVIDENCE] + self.seconds[TimeClass.NAMED]) / total if total else 0.0


def explain(seconds: Mapping[str, float], proven: Mapping[str, Collection[str]]) -> Explanation:
    """Sort `seconds` by whole kernel names. `proven`: of operators, the short names that valid evidence has."""
    of_class: dict[TimeClass, dict[str, float]] = {it: {} for it in TimeClass}
    for name, time in seconds.items():
        found, short_name = of_class[class_of(name, proven)], plain_name(name)[:_NAME_LENGTH]
        found[short_name] = found.get(short_name, 0.0) + max(time, 0.0)
    return Explanation(
        {it: sum(found.values()) for it, found in of_class.items()},
        _longest(of_class[TimeClass.UNPROVEN]),
        _longest(of_class[TimeClass.UNEXPLAINED]),
    )


def class_of(name: str, proven: Mapping[str, Collection[str]]) -> TimeClass:
    """Return the class of a kernel by its whole name.

    A name that looks like one operator's and is in the evidence of another must be in that of both: which of them
    launched it is not recorded.
    """
    plain = plain_name(name)
    names = {plain, short_name(name)}
    in_evidence = {operator for operator, known in proven.items() if not names.isdisjoint(known)}
    is_listed = any(plain in named.patterns for named in NAMED)  # by its whole name
    looks_like = None
    if not is_listed:
        looks_like = next((operator for operator, patterns in OPERATORS if _matches(plain, patterns)), None)
    if looks_like is not None and looks_like not in in_evidence:
        return TimeClass.UNPROVEN
    if in_evidence:
        return TimeClass.EVIDENCE
    is_listed = is_listed or any(_matches(plain, named.patterns) for named in NAMED)
    return TimeClass.NAMED if is_listed else TimeClass.UNEXPLAINED


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _longest(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda it: -it[1])[:_KEPT_NAMES])
