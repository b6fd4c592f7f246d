"""Choice of the path that multiplies so many rows with a weight, by the plan's decisions as they stand now.

What serves is chosen by the number of rows (`kernels/linear/matmul.py`), and the paths of the catalog reject what they
are not chosen for. So a decision for the first of them that can compute a shape changes nothing. Where that one is not
proven, failed, or broke in service, another path is decided, and it multiplies those numbers of rows in its place.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.kept_proposals import KeptProposals
from kernels.linear.library_path import RunProposed
from kernels.linear.paths import LinearPath
from kernels.linear.shape import LinearShape
from kernels.system.device import dtype_of, torch_dtype
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs
from server.engine.operators.counts import ServedShape, dispatch_counts, fallback_uses, first_decision
from server.engine.operators.decisions import Decisions, NoPathError, Redecide
from server.engine.operators.launch_errors import LAUNCH_ERRORS, not_launched
from server.model.linear import Dense, Product
from server.protocol.messages import DispatchCount, PathUse

logger = logging.getLogger(__name__)

_MOST_KNOWN = 4096
# Called behind each product of a checked step, with what it read and wrote.
TakeProduct = Callable[["ServedProduct", Tensor, Tensor], None]


class LinearTable:
    """The decisions for the products of a model, and the path that multiplies where it is not the chosen one."""

    def __init__(
        self,
        decisions: Mapping[LinearShape, Decision[LinearShape]],
        paths: Iterable[LinearPath],
        fingerprint: Fingerprint,
        *,
        redecide: Redecide[LinearShape] = first_decision,
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
        may_replace: bool = True,
    ) -> None:
        """`paths`: those of this machine, the most preferred first.

        `may_replace`: whether the next path may serve where a launch fails in the middle of a step; several ranks start
        again instead.
        """
        kept = KeptProposals()
        self._paths = {it.name: replace(it, run=kept) if isinstance(it.run, RunProposed) else it for it in paths}
        self._fingerprint = fingerprint
        self._may_replace = may_replace
        # By kind: the paths that serve instead of the chosen ones; None where none is left.
        self._replaced: dict[str, dict[LinearRows, LinearPath | None]] = {}
        self._weights: Counter[tuple[LinearShape, bool]] = Counter()  # of one row; whether it is that of a head
        self._known: dict[tuple[int, int], list[ServedShape]] = {}  # of steps that were asked for
        self.tap: TakeProduct | None = None  # of a checked step
        self.decided = Decisions(decisions, redecide, quarantined, overridden, on_change=self._resolve)
        for decision in decisions.values():
            self._resolve(decision)

    @property
    def num_weights(self) -> int:
        """Products of a step with a token to sample."""
        return sum(self._weights.values())

    def product(self, layer: int | None, name: str, linear: Dense, epilogue: Epilogue) -> "ServedProduct":
        """Return what multiplies with a weight from now on; of the head `layer` is None. Called once for each weight.

        A CPU has no products of 16 bits that are stored in fp32: it widens the router's operands, and rounds logits.
        """
        weight, has_bias = linear.weight, linear.bias is not None and name != "router"
        dtype = dtype_of(weight.dtype)
        if epilogue is Epilogue.FP32 and weight.device.type == "cpu":
            epilogue, dtype = Epilogue.NONE, Dtype.FP32 if name == "router" else dtype
        if dtype is Dtype.FP32 and epilogue is Epilogue.FP32:
            epilogue = Epilogue.NONE
        size_out = weight.shape[0] // epilogue.parts
        shape = LinearShape(dtype, weight.shape[1], size_out, LinearRows.LE_1, has_bias, epilogue)
        self._weights[shape, layer is None] += 1
        self._known.clear()
        replaced = self._replaced.setdefault(shape.kind, {})
        return ServedProduct(self, layer, name, shape, weight, linear.bias if has_bias else None, replaced)

    def served(self, num_tokens: int, num_sampled: int) -> tuple[Decision[LinearShape], ...]:
        """Return each decision that serves a step of so many tokens, of which so many are sampled."""
        return tuple(it.decision for it in self._served(num_tokens, num_sampled))

    def check(self, num_tokens: int, num_sampled: int) -> None:
        """Raises NoPathError where a product of such a step has no path any more."""
        for decision in self.served(num_tokens, num_sampled):
            if decision.path is None:
                raise NoPathError(None, f"no path is left for {decision.shape}")

    def counts(self, num_tokens: int, num_sampled: int, num_sequences: int) -> list[DispatchCount]:
        """Return the decisions that serve such a step by bucket, path and status, with their launches."""
        return dispatch_counts(self._served(num_tokens, num_sampled), num_tokens, num_sequences)

    def uses(self, num_tokens: int, num_sampled: int) -> list[PathUse]:
        """Return the fallbacks, and what is not proven, that serve every sequence of such a step."""
        return fallback_uses(self._served(num_tokens, num_sampled))

    def pairs(self, num_tokens: int, num_sampled: int) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of paths of our own in a step: whom to blame when the device is lost in it."""
        served = self.served(num_tokens, num_sampled)
        return [(it.path, str(it.shape)) for it in served if it.path is not None and not it.path.startswith("torch.")]

    def quarantine_failed(self, shape: LinearShape, error: Exception) -> None:
        """Have the next path serve a shape that failed to launch. Raises NoPathError, or `error` of another kind."""
        reason = not_launched(error)
        if reason is None or shape not in self.decided:
            raise error
        path = self.decided[shape].path
        logger.error("%s failed to launch for %s (%s): %s", path, shape, reason.value, error)
        if not self._may_replace:
            raise DeviceLost(f"{path} failed to launch: {error}", [(str(path), str(shape))]) from error
        if self.decided.quarantine(shape) is None:
            raise NoPathError(None, f"no path is left for {shape}") from error

    def _served(self, num_tokens: int, num_sampled: int) -> list[ServedShape]:
        known = self._known.get((num_tokens, num_sampled))
        if known is not None:
            return known
        found = []
        for (kind, is_head), num_launches in self._weights.items():
            num_rows = num_sampled if is_head else num_tokens
            shape = replace(kind, rows=LinearRows.of(num_rows)) if num_rows else None
            if shape is not None and shape in self.decided:
                found.append(ServedShape(self.decided[shape], num_launches))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[num_tokens, num_sampled] = found
        return found

    def _resolve(self, decision: Decision[LinearShape]) -> None:
        self._known.clear()
        shape, replaced = decision.shape, self._replaced.setdefault(decision.shape.kind, {})
        chosen = next((it for it in self._paths.values() if self._is_able(it, shape)), None)
        if decision.path is None:
            replaced[shape.rows] = None
        elif chosen is None or decision.path == chosen.name:
            replaced.pop(shape.rows, None)
        else:
            replaced[shape.rows] = self._paths[decision.path]

    def _is_able(self, path: LinearPath, shape: LinearShape) -> bool:
        return path.run is not None and not path.rejects(shape, self._fingerprint)


@dataclass(frozen=True, slots=True)
class ServedProduct:
    """The product with one weight: by the kernel that the number of rows chooses, or by what is decided in its place.

    layer     None: the head
    name      that of the weight in its layer
    shape     of one row
    weight    [parts * size_out, size_in]
    replaced  the table's own: the paths of numbers of rows that the chosen kernel may not serve, None where none may
    """

    table: LinearTable
    layer: int | None
    name: str
    shape: LinearShape
    weight: Tensor
    bias: Tensor | None
    replaced: Mapping[LinearRows, LinearPath | None]

    def __call__(self, chosen: Product, x: Tensor) -> Tensor:
        """Return epilogue(x [rows, size_in] @ weight^T + bias), which `chosen` computes too. Raises NoPathError."""
        while True:
            path = self._replacement(x.shape[0]) if self.replaced else None
            try:
                y = chosen(x) if path is None else self._by(path, x)
                break
            except LAUNCH_ERRORS as error:
                self.table.quarantine_failed(self.shape_of(x.shape[0]), error)
        if self.table.tap is not None:
            self.table.tap(self, x, y)
        return y

    def shape_of(self, num_rows: int) -> LinearShape:
        return replace(self.shape, rows=LinearRows.of(num_rows))

    def path_of(self, num_rows: int) -> str | None:
        """Return the path that multiplies so many rows now; None for a number that the plan does not have."""
        shape = self.shape_of(num_rows)
        return self.table.decided[shape].path if shape in self.table.decided else None

    def _replacement(self, num_rows: int) -> LinearPath | None:
        """Return what multiplies so many rows in the place of the chosen kernel; None where that one serves."""
        rows = LinearRows.of(num_rows)
        path = self.replaced.get(rows)
        if path is None and rows in self.replaced:
            raise NoPathError(None, f"no path is left for {self.shape_of(num_rows)}")
        return path

    def _by(self, path: LinearPath, x: Tensor) -> Tensor:
        assert path.run is not None
        out = torch.empty(x.shape[0], self.shape.size_out, dtype=torch_dtype(self.shape.dtype_out), device=x.device)
        path.run(x, self.weight.to(x.dtype), self.bias, self.shape.epilogue, out)
        return out
