"""The kernels that calls launched, by name. Imports no torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Seen:
    """Kernel names by how often they ran: of each marked call, and outside of all calls.

    seconds           of everything that ran, data movers included, by its whole name: of kernels their time on the
                      device, of operators on a CPU their time without the operators that they call. Empty: not timed
    seconds_in_calls  of these, what ran within marked calls; on a CPU alone, where it is known which did
    """

    calls: tuple[Counter[str], ...]
    outside: Counter[str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    seconds_in_calls: Mapping[str, float] = field(default_factory=dict)

    @property
    def always(self) -> tuple[str, ...]:
        """Names that every call launched, sorted."""
        names = [set(call) for call in self.calls]
        return tuple(sorted(set.intersection(*names))) if names else ()

    @property
    def sometimes(self) -> tuple[str, ...]:
        """Names that some calls launched and others did not, sorted."""
        return tuple(sorted({name for call in self.calls for name in call} - set(self.always)))
