"""Compare the kernels that the profiler saw with those that the evidence promises. Imports no torch.

A call that was launched kernel by kernel is judged by itself. A CUDA graph holds all calls of a step without borders
between them, so it is judged as a whole: each promised kernel as often as it was counted, and none of another path.
The layers of a step share one plan: a kernel that plans runs once for launches that were counted together.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from kernels.driver.kernel_names import short_name
from kernels.vocabulary.path import AnyPath, Tier
from qualification.evidence.evidence import Evidence

_PLANS = ("_plan", "_split")  # end the names of kernels that plan a batch


@dataclass(frozen=True, slots=True)
class Promise:
    """The kernels that a call of a path may launch, and those that it must."""

    path: str
    always: tuple[str, ...]
    sometimes: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # without evidence: one of these is in the name of every kernel of the path
    either: tuple[tuple[str, ...], ...] = ()  # a call launches one of these sets

    @property
    def is_measured(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> frozenset[str]:
        """Every kernel that a call may launch, as far as whole names are known."""
        return frozenset((*self.always, *self.sometimes, *chain.from_iterable(self.either)))


def promise_of(path: AnyPath, evidence: Evidence | None) -> Promise:
    """Return the promise of a path by its evidence's kernel names; where it has none, by the catalog's markers.

    Where the batch decides which kernels serve, the calls of the evidence need not have met all of them.
    """
    if evidence is None or not evidence.all_kernels:
        return Promise(path.name, (), (), path.kernel_names)
    if set(evidence.all_kernels) <= set(chain.from_iterable(path.alternatives)):
        return Promise(path.name, (), either=path.alternatives)
    return Promise(path.name, evidence.kernels or (), evidence.kernels_sometimes)


def attention_markers(paths: Iterable[AnyPath]) -> frozenset[str]:
    """Names that only attention kernels of this project's own paths have."""
    return frozenset(
        name
        for path in paths
        if path.tier is Tier.FIRST
        for name in (*path.kernel_names, *chain.from_iterable(path.alternatives))
        if "::" not in name
    )


def kernels_promised(promises: Iterable[Promise], seen: Iterable[str]) -> frozenset[str]:
    """Return the short names that the promises have; where they have markers only, those `seen` that hold one."""
    promises, seen = list(promises), [short_name(name) for name in seen]
    loose = [marker for promise in promises if not promise.is_measured for marker in promise.markers]
    held = (name for name in seen if any(marker in name for marker in loose))
    return frozenset(held).union(*(promise.names for promise in promises))


def call_mismatch(promise: Promise, seen: Mapping[str, int]) -> str | None:
    """Return what is wrong with one call's kernels; None when they are as promised."""
    if not seen:
        return f"{promise.path} launched no kernel that the profiler saw"
    if not promise.is_measured:
        foreign = [name for name in sorted(seen) if not any(marker in name for marker in promise.markers)]
        return f"{promise.path} launched {_list(foreign)}, which its catalog entry does not know" if foreign else None
    if promise.either:
        is_one = any(set(seen) == set(kernels) for kernels in promise.either)
        return None if is_one else f"{promise.path} launched {_list(sorted(seen))}, not {_sets(promise.either)}"
    missing = sorted(set(promise.always) - set(seen))
    foreign = sorted(set(seen) - set(promise.always) - set(promise.sometimes))
    parts = [f"did not launch {_list(missing)}"] if missing else []
    parts += [f"launched {_list(foreign)}, which its evidence does not know"] if foreign else []
    return f"{promise.path} {' and '.join(parts)}" if parts else None


def replay_mismatch(
    promises: Iterable[tuple[Promise, int]], seen: Mapping[str, int], markers: frozenset[str]
) -> str | None:
    """Return what is wrong with a replayed step. `promises`: each with how many launches were counted for it."""
    promises = list(promises)
    wanted: Counter[str] = Counter()
    for promise, num_launches in promises:
        for name in promise.always:
            wanted[name] += min(num_launches, 1) if name.endswith(_PLANS) else num_launches
    parts = [
        f"{name} ran {seen.get(name, 0)} times, {count} were counted"
        for name, count in sorted(wanted.items())
        if seen.get(name, 0) != count
    ]
    parts += _uneven(promises, seen)
    parts += _too_few(promises, seen)
    known = frozenset[str]().union(*(promise.names for promise, _ in promises))
    loose = [marker for promise, _ in promises if not promise.is_measured for marker in promise.markers]
    foreign = [
        name for name in sorted(set(seen) - known) if name in markers and not any(marker in name for marker in loose)
    ]
    parts += [f"{_list(foreign)} ran, which no path of the step promised"] if foreign else []
    paths = ", ".join(dict.fromkeys(promise.path for promise, _ in promises))
    return f"in a replay of {paths}: {'; '.join(parts)}" if parts else None


def _uneven(promises: Iterable[tuple[Promise, int]], seen: Mapping[str, int]) -> list[str]:
    """Check paths with alternatives: each launch is one of the sets, and all kernels of a set ran equally often."""
    counted: Counter[tuple[tuple[str, ...], ...]] = Counter()
    for promise, num_launches in promises:
        if promise.either:
            counted[promise.either] += num_launches
    found = []
    for either, num_launches in counted.items():
        runs = [[seen.get(name, 0) for name in kernels] for kernels in either]
        if any(min(times) != max(times) for times in runs) or sum(times[0] for times in runs) != num_launches:
            times = ", ".join(f"{name} {seen.get(name, 0)}" for name in chain.from_iterable(either))
            found.append(f"of {_sets(either)} ran {times} times, {num_launches} launches were counted")
    return found


def _too_few(promises: Iterable[tuple[Promise, int]], seen: Mapping[str, int]) -> list[str]:
    """Check paths without kernel names: each launch has a kernel with a marker, or another ran in its place."""
    counted: Counter[tuple[str, ...]] = Counter()
    for promise, num_launches in promises:
        if not promise.is_measured:
            counted[promise.markers] += num_launches
    found = []
    for markers, num_launches in counted.items():
        found_in = [name for name in seen if any(marker in name for marker in markers) and not name.endswith(_PLANS)]
        num_seen = sum(seen[name] for name in found_in)
        if num_seen < num_launches:
            found.append(f"{' or '.join(markers)} ran {num_seen} times, {num_launches} were counted")
    return found


def _sets(either: Iterable[Iterable[str]]) -> str:
    return " or ".join(" with ".join(kernels) for kernels in either)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
