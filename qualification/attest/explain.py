"""Sort the time of a forward pass by what is known of the kernels that took it. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType

from kernels.driver.kernel_names import plain_name, short_name
from kernels.identity.known_kernels import ALSO_OF, NAMED, OPERATORS
from kernels.vocabulary.operators import Operator

_ATTENTION = Operator.ATTENTION.value
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


def explain(
    seconds: Mapping[str, float],
    proven: Mapping[str, Collection[str]],
    *,
    in_attention: Mapping[str, float] = MappingProxyType({}),
) -> Explanation:
    """Sort `seconds` by whole kernel names. `proven`: of operators, the short names that valid evidence has.

    `in_attention`: the part of `seconds` that ran within calls of attention, where that is known: it is attention's.
    """
    of_class: dict[TimeClass, dict[str, float]] = {it: {} for it in TimeClass}
    times = [(class_of_attention(name, proven), name, time) for name, time in in_attention.items()]
    times += [(class_of(name, proven), name, time - in_attention.get(name, 0.0)) for name, time in seconds.items()]
    for class_found, name, time in times:
        found, short_name = of_class[class_found], plain_name(name)[:_NAME_LENGTH]
        if time > 0:
            found[short_name] = found.get(short_name, 0.0) + time
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
    if looks_like is not None and in_evidence.isdisjoint((looks_like, ALSO_OF.get(plain))):
        return TimeClass.UNPROVEN
    if in_evidence:
        return TimeClass.EVIDENCE
    is_listed = is_listed or any(_matches(plain, named.patterns) for named in NAMED)
    return TimeClass.NAMED if is_listed else TimeClass.UNEXPLAINED


def class_of_attention(name: str, proven: Mapping[str, Collection[str]]) -> TimeClass:
    """Return the class of a kernel that ran within a call of attention: it may look like a product, and is none.

    Attention by plain PyTorch multiplies by the operators that products run on too.
    """
    of_attention = proven.get(_ATTENTION, ())
    if plain_name(name) in of_attention or short_name(name) in of_attention:
        return TimeClass.EVIDENCE
    return class_of(name, {})


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _longest(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda it: -it[1])[:_KEPT_NAMES])
