"""Operators' orders in the engine: which paths serve which shapes no more, whatever their evidence says."""

import logging
from collections.abc import Mapping

from kernels.shape import AttentionShape
from qualification.evidence.evidence import Evidence
from server.engine.attention.dispatch import Dispatcher
from server.protocol.messages import Overridden, Override, PlanChanged
from server.protocol.plan_rows import plan_rows

logger = logging.getLogger(__name__)


class Overrides:
    """Carries orders out between two steps; only the thread that steps may call it."""

    def __init__(self, dispatcher: Dispatcher, evidence: Mapping[tuple[AttentionShape, str], Evidence]) -> None:
        self._dispatcher = dispatcher
        self._evidence = evidence

    def obey(self, message: Override) -> Overridden:
        """All of an order, or nothing where a shape would be left without a path."""
        before = self._dispatcher.overridden
        wanted = before.union(message.take_out).difference(message.lift)
        stranded = [str(shape) for shape in self._dispatcher.override(wanted)]
        after = self._dispatcher.overridden
        logger.warning(
            "order %d: %d (path, shape) pairs taken out of service, %d lifted, %d shapes would be left without a path",
            message.order,
            len(after - before),
            len(before - after),
            len(stranded),
        )
        return Overridden(message.order, stranded, sorted(after))

    def plan(self) -> PlanChanged:
        """What serves each shape now."""
        return PlanChanged(plan_rows(self._dispatcher.plan, self._evidence))
