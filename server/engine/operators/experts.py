"""Choice of the path of a mixture's products by tokens: decided before ready, one lookup a layer in service.

The number of tokens of a step alone chooses the path, on the host: a CUDA graph, which holds one number, holds the
choice too.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath, RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.experts.weights import AnyExpertWeights
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs
from qualification.decision.model_shapes import experts_shape
from qualification.model.config import ExpertsConfig, ModelConfig
from server.engine.operators.counts import ServedShape, dispatch_counts, first_decision, use_of
from server.engine.operators.decisions import Decisions, NoPathError, Redecide
from server.engine.operators.launch_errors import LAUNCH_ERRORS, not_launched
from server.model.experts import ExpertProducts
from server.protocol.messages import DispatchCount, PathUse

logger = logging.getLogger(__name__)

_EDGES = tuple(bucket.hi for bucket in TokenRows if bucket.hi is not None)


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """A decision with what is needed to run it, resolved once."""

    decision: Decision[ExpertsShape]
    path: ExpertsPath
    run: RunExperts
    use: PathUse


@dataclass(slots=True)
class _Mixture:
    """Layers of equal mixtures, and their choice for each bucket of tokens, the fewest first; None: no path is left."""

    num_layers: int
    shapes: tuple[ExpertsShape, ...]
    choices: list[ExpertsChoice | None] = field(default_factory=list)

    def index(self, num_tokens: int) -> int:
        """Return the index of the shape of so many tokens: the last one beyond a step's most, as in warm-up."""
        return min(bisect_left(_EDGES, num_tokens), len(self.shapes) - 1)

    def choice(self, num_tokens: int) -> ExpertsChoice:
        found = self.choices[self.index(num_tokens)]
        if found is None:
            raise NoPathError(None, f"no path is left for {self.shapes[self.index(num_tokens)]}")
        return found


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """Tensors that one layer's experts read and wrote.

    hidden, out      [T, H]
    experts, shares  [T, k]: the experts of each token, and their weights in fp32
    """

    hidden: Tensor
    experts: Tensor
    shares: Tensor
    weights: AnyExpertWeights
    mixture: ExpertsConfig
    out: Tensor


TakeExperts = Callable[[ExpertsChoice, ExpertsCall], None]  # called behind the experts of each layer of a checked step


class ExpertsTable:
    """The decisions for a model's mixtures."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[ExpertsShape, Decision[ExpertsShape]],
        paths: Iterable[ExpertsPath] = EXPERTS_PATHS,
        *,
        redecide: Redecide[ExpertsShape] = first_decision,
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
        may_replace: bool = True,
    ) -> None:
        """`config`: of this rank's part of the model. A shape without a path raises NoPathError.

        `may_replace`: as for `LinearTable`.
        """
        self._by_name = {path.name: path for path in paths}
        self._may_replace = may_replace
        self.tap: TakeExperts | None = None  # of a checked step
        self.decided = Decisions(decisions, redecide, quarantined, overridden, on_change=self._resolve)
        self.layers = tuple(i for i, it in enumerate(config.layers) if isinstance(it.feed_forward, ExpertsConfig))
        counted = Counter(it.feed_forward for it in config.layers if isinstance(it.feed_forward, ExpertsConfig))
        self._mixtures: dict[ExpertsConfig, _Mixture] = {}
        for mixture, num_layers in counted.items():
            shapes = (experts_shape(mixture, config.hidden_size, dtype, rows) for rows in TokenRows)
            planned = tuple(shape for shape in shapes if shape in decisions)
            choices: list[ExpertsChoice | None] = [self._choice(decisions[shape]) for shape in planned]
            self._mixtures[mixture] = _Mixture(num_layers, planned, choices)

    @property
    def decisions(self) -> list[Decision[ExpertsShape]]:
        """Return the decision for each shape now."""
        return list(self.decided.plan.values())

    @property
    def borders(self) -> tuple[int, ...]:
        """Return the first number of tokens of each bucket."""
        return tuple({shape.rows.lo + 1: None for it in self._mixtures.values() for shape in it.shapes})

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold every choice."""
        choices = [choice for it in self._mixtures.values() for choice in it.choices]
        return all(choice is not None and choice.path.is_capturable for choice in choices)

    def products_of(self, mixture: ExpertsConfig, weights: AnyExpertWeights) -> ExpertProducts:
        """Return what computes the products of a layer, by the choice for the number of tokens."""
        of, activation = self._mixtures[mixture], mixture.activation

        def products(hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
            out = torch.empty_like(hidden)
            while True:
                choice = of.choice(hidden.shape[0])
                try:
                    choice.run(hidden, experts, shares, weights, activation, out)
                    break
                except LAUNCH_ERRORS as error:
                    self._quarantine_failed(choice, error)
            if self.tap is not None:
                self.tap(choice, ExpertsCall(hidden, experts, shares, weights, mixture, out))
            return out

        return products

    def served(self, num_tokens: int) -> tuple[Decision[ExpertsShape], ...]:
        """Return each decision that serves a step of so many tokens."""
        return tuple(it.decision for it in self._served(num_tokens))

    def check(self, num_tokens: int) -> None:
        """Raises NoPathError where a mixture has no path any more for so many tokens."""
        for mixture in self._mixtures.values():
            mixture.choice(num_tokens)

    def counts(self, num_tokens: int, num_sequences: int) -> list[DispatchCount]:
        """Return the decisions that serve a step of so many tokens, with their launches: one a layer."""
        return dispatch_counts(self._served(num_tokens), num_tokens, num_sequences)

    def uses(self, num_tokens: int) -> list[PathUse]:
        """Return what serves every sequence of a step of so many tokens."""
        return [use_of(it) for it in self.served(num_tokens) if it.path is not None]

    def pairs(self, num_tokens: int) -> list[tuple[str, str]]:
        """Return every (path, shape) of a step: whom to blame when the device is lost in it."""
        return [(it.path, str(it.shape)) for it in self.served(num_tokens) if it.path is not None]

    def _quarantine_failed(self, choice: ExpertsChoice, error: Exception) -> None:
        """Have the next path serve what failed to launch. Raises NoPathError, or `error` of another kind."""
        reason, shape = not_launched(error), choice.decision.shape
        if reason is None:
            raise error
        logger.error("%s failed to launch for %s (%s): %s", choice.use.path, shape, reason.value, error)
        if not self._may_replace:
            raise DeviceLost(f"{choice.use.path} failed to launch: {error}", [(choice.use.path, str(shape))]) from error
        if self.decided.quarantine(shape) is None:
            raise NoPathError(None, f"no path is left for {shape}") from error

    def _served(self, num_tokens: int) -> list[ServedShape]:
        return [
            ServedShape(self.decided[it.shapes[it.index(num_tokens)]], it.num_layers) for it in self._mixtures.values()
        ]

    def _resolve(self, decision: Decision[ExpertsShape]) -> None:
        for mixture in self._mixtures.values():
            if decision.shape in mixture.shapes:
                mixture.choices[mixture.shapes.index(decision.shape)] = self._choice(decision)

    def _choice(self, decision: Decision[ExpertsShape]) -> ExpertsChoice | None:
        if decision.path is None:
            return None
        path = self._by_name[decision.path]
        assert path.run is not None
        return ExpertsChoice(decision, path, path.run, use_of(decision))
