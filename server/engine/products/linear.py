"""Which path multiplies how many rows with each weight, by the decisions of the plan.

What serves is chosen by the number of rows (`kernels/linear/matmul.py`), and the paths of the catalog reject what they
are not chosen for. So a decision for the first of them that can compute a shape changes nothing. Where that one is not
proven, or failed, the decision is for PyTorch's product, and a weight gets it for those numbers of rows.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from kernels.device import dtype_of
from kernels.fingerprint import Fingerprint
from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LinearPath
from kernels.linear.shape import LinearShape
from kernels.row_buckets import LinearRows
from kernels.shape import Dtype
from qualification.decision.decision import Decision

_LAST = "torch.linear"


class LinearTable:
    """The decisions of the plan for products with weights. Nothing of it changes in service."""

    def __init__(
        self,
        decisions: Mapping[LinearShape, Decision[LinearShape]],
        paths: Iterable[LinearPath],
        fingerprint: Fingerprint,
    ) -> None:
        """`paths`: those of this machine, the most preferred first."""
        self.decisions = tuple(decisions.values())
        able = tuple(path for path in paths if path.run is not None)
        self._by_torch: dict[str, set[LinearRows]] = {}
        for shape, decision in decisions.items():
            first = next((path.name for path in able if not path.rejects(shape, fingerprint)), _LAST)
            if decision.path == _LAST != first:
                self._by_torch.setdefault(shape.kind, set()).add(shape.rows)

    @property
    def fallbacks(self) -> list[Decision[LinearShape]]:
        """Return the decisions that leave rows to PyTorch."""
        return [it for it in self.decisions if it.shape.rows in self._by_torch.get(it.shape.kind, ())]

    def by_torch(self, weight: Tensor, has_bias: bool, epilogue: Epilogue) -> frozenset[LinearRows]:
        """Return the numbers of rows that PyTorch multiplies with such a weight; none where nothing is in the way."""
        if not self._by_torch:
            return frozenset()
        dtype = dtype_of(weight.dtype)
        if dtype is Dtype.FP32 and epilogue is Epilogue.FP32:
            epilogue = Epilogue.NONE
        size_out = weight.shape[0] // epilogue.parts
        shape = LinearShape(dtype, weight.shape[1], size_out, LinearRows.LE_1, has_bias, epilogue)
        return frozenset(self._by_torch.get(shape.kind, ()))
