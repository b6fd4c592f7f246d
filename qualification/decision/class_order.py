"""The order in which one class of shapes sums under `reproducible`, and what stands against a path because of it.

A class holds all shapes in which the same numbers of one sequence can be computed: attention of one kind of layer in
all phases and lengths, products with weights of one size and format of all numbers of rows. Were two of its shapes
summed in two orders, the bits of a sequence would depend on the batches that it was computed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kernels.vocabulary.operators import AnyShape, operator_of
from kernels.vocabulary.path import AnyPath, Reject, Rejection
from qualification.evidence.anchors import Anchor, broken_promise
from qualification.evidence.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Bar:
    """Why a path may not serve under `reproducible`."""

    rejection: Rejection
    is_failure: bool = False  # it was checked, and its bits depend on the batch


@dataclass(frozen=True, slots=True)
class ClassOrder:
    """The order chosen for one class of shapes. `order` None: no path of the operator sums in a fixed order."""

    name: str  # of the class
    order: str | None
    wanted: str | None = None  # the first order of the catalog that can compute every shape; None: none can
    is_served: bool = False  # a path of the order may serve every shape
    lacking: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # order -> what it lacks
    anchors: Mapping[str, Anchor] = field(default_factory=lambda: MappingProxyType({}))  # of `order`, by input

    def bar(self, path: AnyPath, shape: AnyShape, evidence: Evidence | None) -> Bar | None:
        """Return what stands against the path; None where its bits are shown to be those of the order."""
        operator = operator_of(shape).value
        if path.order is None:
            return _barred("sums in no fixed order: the bits of a row may depend on the batch")
        if path.order != self.order:
            lacks = f", for {path.order} lacks {why}" if (why := self.lacking.get(path.order)) else ""
            return _barred(f"sums in order {path.order}, {operator} of this model in {self.order}{lacks}")
        if evidence is None or evidence.invariance is None or not evidence.invariance.is_of(path.order):
            return _barred(f"was not checked here for order {path.order}: whether its bits depend on the batch")
        broken = broken_promise(evidence, path.order, self.anchors)
        return None if broken is None else _barred(broken, is_failure=True)

    @property
    def problem(self) -> str | None:
        """Return a line that says why no order serves every shape; None where one does."""
        if self.is_served:
            return None
        if not self.lacking:
            return f"no path of {self.name} sums in a fixed order on this machine"
        orders = "; ".join(f"{order} lacks {why}" for order, why in self.lacking.items())
        return f"no order has a path for every shape of {self.name}: {orders}"


def _barred(detail: str, *, is_failure: bool = False) -> Bar:
    return Bar(Rejection(Reject.BATCH_VARIANT, detail), is_failure)
