"""The decisions of one operator as they stand now: made again without what broke, and without what was taken out."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Generic

from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Decision, Pairs, ShapeT, Status
from qualification.evidence.shape_text import parse_shape

logger = logging.getLogger(__name__)

_QUARANTINED = frozenset({Reject.QUARANTINED, Reject.OPERATOR_OVERRIDE})

# Decides a shape again without the (path, shape) pairs that broke, and without those that an operator took out.
Redecide = Callable[[ShapeT, Pairs, Pairs], Decision[ShapeT]]


class NoPathError(Exception):
    """No path is left (or none was planned) that may serve a part of the batch.

    phase  the rows that cannot be served; None: none can, because a product of every row has no path
    """

    def __init__(self, phase: Phase | None, message: str) -> None:
        super().__init__(message)
        self.phase = phase


def why_no_path(decision: Decision[AnyShape]) -> str:
    """Return, behind a colon, which paths of a shape are quarantined and why no other serves; nothing where none is."""
    codes = {it.path: {why.code for why in it.rejections} for it in decision.candidates}
    out = [path for path, of_path in codes.items() if of_path & _QUARANTINED]
    if not out:
        return ""
    is_ordered = any(Reject.BATCH_VARIANT in of_path for of_path in codes.values())
    others = ", and under --reproducible only paths of one order of sums may serve" if is_ordered else ""
    return f": {', '.join(out)} {'is' if len(out) == 1 else 'are'} quarantined{others}; GET /plan has the reasons"


class Decisions(Generic[ShapeT]):
    """The decision for each shape of an operator. A launch or a check that fails quarantines (path, shape) pairs, an
    operator's order takes them out.
    """

    def __init__(
        self,
        decisions: Mapping[ShapeT, Decision[ShapeT]],
        redecide: Redecide[ShapeT],
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
        *,
        on_change: Callable[[Decision[ShapeT]], None] = lambda _: None,
    ) -> None:
        """`decisions` were already made without the pairs `quarantined` and `overridden`.

        `on_change`: called with each decision that takes the place of another.
        """
        self._on_change = on_change
        self._redecide = redecide
        self._quarantined = quarantined
        self._now = dict(decisions)
        self._news: list[tuple[str, str]] = []
        self.overridden = overridden
        self.revision = 0  # grows with every change

    def __getitem__(self, shape: ShapeT) -> Decision[ShapeT]:
        return self._now[shape]

    def __contains__(self, shape: object) -> bool:
        return shape in self._now

    @property
    def plan(self) -> dict[ShapeT, Decision[ShapeT]]:
        """Return the decision for each shape now, shapes that no path serves any more included."""
        return dict(self._now)

    def take_quarantined(self) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs quarantined since the last call."""
        news, self._news = self._news, []
        return news

    def quarantine(self, shape: ShapeT) -> Decision[ShapeT] | None:
        """Quarantine the path that serves a shape, and decide the shape again; None where no path is left."""
        path, name = self._now[shape].path, str(shape)
        assert path is not None
        self._quarantined |= {(path, name)}
        self._news.append((path, name))
        self.revision += 1
        decision = self._redecide(shape, self._quarantined, self.overridden)
        if decision.path is None or (decision.path, name) in self._quarantined:
            decision = replace(decision, path=None)
            logger.error("no path is left for %s%s", shape, why_no_path(decision))
        else:
            logger.warning("%s serves %s from now on", decision.path, shape)
        self._now[shape] = decision
        self._on_change(decision)
        return None if decision.path is None else decision

    def take(self, decisions: Mapping[ShapeT, Decision[ShapeT]]) -> None:
        """Take decisions in the place of all there are: another rank has made them."""
        changed = [it for it in decisions.values() if self._now.get(it.shape) != it]
        self._now = dict(decisions)
        self.revision += 1
        for decision in changed:
            self._on_change(decision)

    def without(self, pairs: Pairs) -> dict[ShapeT, Decision[ShapeT]]:
        """Return the decisions that would change if operators had taken out these pairs and no others."""
        known = {str(shape): shape for shape in self._now}
        concerned = {known[name] for _, name in pairs ^ self.overridden if name in known}
        return {shape: self._redecide(shape, self._quarantined, pairs) for shape in concerned}

    def stranded(self, changes: Mapping[ShapeT, Decision[ShapeT]]) -> list[ShapeT]:
        """Return the shapes that have a path now and would have none."""
        return [shape for shape, it in changes.items() if it.path is None and self._now[shape].path is not None]

    def override(self, pairs: Pairs, changes: Mapping[ShapeT, Decision[ShapeT]]) -> None:
        """Take out these pairs and no others from now on. `changes`: what `without` returned for them."""
        self.overridden = pairs
        self._now.update(changes)
        self.revision += 1
        for decision in changes.values():
            self._on_change(decision)


def decided(decisions: Iterable[tuple[str, str | None]]) -> dict[AnyShape, Decision[AnyShape]]:
    """Return decisions of another process in its order; a shape without a path keeps its place."""
    found: dict[AnyShape, Decision[AnyShape]] = {}
    for text, path in decisions:
        shape = parse_shape(text)
        status = Status.QUARANTINED if path is None else Status.PROVEN
        found[shape] = Decision(shape, path, status, path or "none", (), (), None)
    return found
