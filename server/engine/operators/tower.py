"""A tower's attention and products by the plan's decisions, as the decoder's are, but by the patches of its images."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.plan import plan
from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LinearPath, RunLinear
from kernels.linear.shape import LinearShape
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.decision.decision import Decision, decisions_of
from qualification.model.tower import TowerConfig
from server.engine.operators.attention_table import AttentionTable, Choice
from server.engine.operators.dispatch_key import FULL, Heads
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.linear import LinearTable, ServedProduct
from server.engine.operators.rows_table import Calls, StepSizes
from server.engine.operators.table import OperatorChoice, OperatorTable, TableOptions
from server.model.linear import Linear
from server.model.vision.weights import TowerWeight
from server.protocol.messages import DispatchCount, PathUse
from server.protocol.plan_rows import TOWER

AnyChoice = OperatorChoice[Any, Any]
# Called behind a call of attention, with what the path had: its choice and batch, the layer, q, k, v and out.
TakeTowerCall = Callable[[Choice, AttentionBatch, int, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(slots=True)
class TowerCalls:
    """Record of what served the images that were computed together.

    attention  each choice that ran, with its launches; `sizes`: those that choose the products
    """

    sizes: StepSizes
    attention: dict[AttentionShape, tuple[Choice, int]]


class TowerAttention:
    """Attention over sequences of patches, the images' or their windows': planned once for all layers."""

    def __init__(self, tables: "TowerTables", batch: AttentionBatch, calls: TowerCalls) -> None:
        self._tables = tables
        self._batch = batch
        self._planned = plan(batch)
        self._calls = calls

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of q, k, v [patches, heads, head_dim] of a layer. Raises NoPathError."""
        tables, out = self._tables, q.new_empty(q.shape)
        while True:
            choice = tables.attention.choice(Phase.PREFILL, self._batch, tables.kind, FULL)
            # A call that is watched plans for itself: it is judged, and may be captured, without the others.
            batch = self._planned if tables.watch is None else self._batch
            try:
                if tables.watch is None:
                    choice.run(q, k, v, batch, tables.flags, out)
                else:
                    with tables.watch(choice):
                        choice.run(q, k, v, batch, tables.flags, out)
            except LAUNCH_ERRORS as error:
                tables.attention.replace(choice, error)
            else:
                break
        shape = choice.decision.shape
        _, count = self._calls.attention.get(shape, (choice, 0))
        self._calls.attention[shape] = choice, count + 1
        if tables.tap is not None:
            tables.tap(choice, self._batch, layer, q, k, v, out)
        return out


class _Products(LinearTable):
    """The decisions for a tower's products. `watch`: as that of `TowerTables`, of each launch."""

    watch: Callable[[AnyChoice], AbstractContextManager[object]] | None = None

    def launch(self, calls: Calls[LinearShape], num_rows: int, *given: Any) -> OperatorChoice[LinearShape, RunLinear]:
        if self.watch is None:
            return super().launch(calls, num_rows, *given)
        place = calls.place(num_rows)
        choice = calls.choices[place]
        if choice is None:
            raise self.no_path(calls.shapes[place])
        with self.watch(choice):
            return super().launch(calls, num_rows, *given)


class TowerTables:
    """The tables of a tower: the decisions for its attention, and those for its products.

    watch  gives the context in which a choice is run, the recorder's mark; None: calls are not recorded
    tap    takes the tensors of each call of attention of a checked tower
    """

    def __init__(
        self,
        config: TowerConfig,
        decisions: Mapping[AnyShape, Decision[AnyShape]],
        attention: Iterable[KernelPath],
        products: Iterable[LinearPath],
        *,
        shapes: Iterable[AnyShape],
        **options: Unpack[TableOptions[Any]],
    ) -> None:
        """`shapes`: those of the tower. `attention`, `products`: the paths that were qualified, and nothing else."""
        own = {shape: decisions[shape] for shape in shapes}
        self.attention = AttentionTable(decisions_of(AttentionShape, own), attention, **options)
        self.linear = _Products(decisions_of(LinearShape, own), products, **options)
        self._num_layers = config.num_layers
        self.kind = (None, Heads(config.num_heads, config.num_heads, config.head_dim))
        self.flags = AttentionFlags(config.scale, causal=False)
        self.watch: Callable[[AnyChoice], AbstractContextManager[object]] | None = None
        self.tap: TakeTowerCall | None = None
        self.latest: TowerCalls | None = None  # of the images that were computed last
        self._unreported: list[TowerCalls] = []

    @property
    def tables(self) -> tuple[OperatorTable[Any, Any], ...]:
        return self.attention, self.linear

    @property
    def num_calls(self) -> int:
        """Return how many calls of attention and of products one computation makes."""
        return self._num_layers + self.linear.num_launches

    def begin(self, num_patches: int, num_tokens: int, num_images: int) -> None:
        """Images are about to be computed together. Raises NoPathError where a product of them has no path any more."""
        sizes = StepSizes(num_patches, num_tokens, num_images)
        self.linear.check(sizes)
        self.latest = TowerCalls(sizes, {})
        self._unreported.append(self.latest)

    def attend(self, ends: Tensor, longest: int) -> TowerAttention:
        """Plan attention of sequences that end at `ends` [sequences + 1] int32 on the device, the first at 0."""
        assert self.latest is not None, "images are begun before they are computed"
        return TowerAttention(self, AttentionBatch(ends, longest, longest, cu_seqlens_k=ends), self.latest)

    def product(self, layer: int | None, name: TowerWeight, linear: Linear) -> ServedProduct:
        """Return what multiplies with a weight. Called once for each."""
        return self.linear.product(layer, name, linear, Epilogue.NONE, is_sampled=name.is_of_tokens)

    def take(self) -> tuple[list[PathUse], list[DispatchCount]]:
        """Return what has served images since the last call: as a request says of it, and each decision's launches.

        A request names each decision for attention, and of products those that are no proven first choice.
        """
        uses: list[PathUse] = []
        counts: list[DispatchCount] = []
        for calls in self._unreported:
            chosen = list(calls.attention.values())
            uses += [*(_use(choice) for choice, _ in chosen), *self.linear.uses(calls.sizes)]
            counts += [_count(choice, calls.sizes, num_launches) for choice, num_launches in chosen]
            counts += self.linear.counts(calls.sizes)
        self._unreported.clear()
        return _distinct(uses), counts

    def pairs(self) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of the images that were computed last: whom to blame for a lost device."""
        if self.latest is None:
            return []
        found = [(choice.use.path, str(shape)) for shape, (choice, _) in self.latest.attention.items()]
        return [*found, *self.linear.pairs(self.latest.sizes)]


def _use(choice: Choice) -> PathUse:
    use = choice.use
    return PathUse(TOWER, use.path, use.status, use.fallback_reasons)


def _distinct(uses: Iterable[PathUse]) -> list[PathUse]:
    found: list[PathUse] = []
    for use in uses:
        found += [] if use in found else [use]
    return found


def _count(choice: Choice, sizes: StepSizes, num_launches: int) -> DispatchCount:
    decision = choice.decision
    return DispatchCount(
        phase=TOWER,
        bucket=decision.shape.context_bucket.label,
        path=choice.use.path,
        status=choice.use.status,
        wanted=decision.wanted,
        fallback_reasons=choice.use.fallback_reasons,
        num_sequences=sizes.num_sequences,
        num_tokens=sizes.num_sampled,
        num_launches=num_launches,
    )
