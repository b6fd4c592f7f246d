"""Operators' changes of the quarantine, carried out in the engine whatever the evidence says."""

import logging
from collections.abc import Mapping

from kernels.vocabulary.operators import AnyShape
from qualification.evidence.evidence import Evidence
from server.engine.operators.dispatch import Dispatcher
from server.protocol.messages import ChangeQuarantine, PlanChanged, QuarantineChanged
from server.protocol.plan_rows import plan_rows

logger = logging.getLogger(__name__)


class OperatorQuarantine:
    """Carries changes out between two steps; only the thread that steps may call it."""

    def __init__(self, dispatcher: Dispatcher, evidence: Mapping[tuple[AnyShape, str], Evidence]) -> None:
        self._dispatcher = dispatcher
        self._evidence = evidence

    def change(self, message: ChangeQuarantine) -> QuarantineChanged:
        """Carry out the whole change, or nothing where a shape would be left without a path."""
        before = self._dispatcher.overridden
        wanted = before.union(message.add).difference(message.lift)
        stranded = [str(shape) for shape in self._dispatcher.override(wanted)]
        after = self._dispatcher.overridden
        logger.warning(
            "operator's quarantine, request %d: %d (path, shape) pairs added, %d lifted, "
            "%d shapes would be left without a path",
            message.request,
            len(after - before),
            len(before - after),
            len(stranded),
        )
        return QuarantineChanged(message.request, stranded, sorted(after))

    def plan(self) -> PlanChanged:
        """Return the path that serves each shape now."""
        return PlanChanged(plan_rows(self._dispatcher.all_decisions, self._evidence))
