"""Which path computes a mixture's products for so many tokens: decided before ready, one lookup a layer in service.

The number of tokens of a step alone chooses the path, on the host: a CUDA graph, which holds one number, holds the
choice too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath, RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.experts.weights import AnyExpertWeights
from kernels.operators import phase_of
from kernels.row_buckets import ExpertRows
from kernels.shape import Dtype
from qualification.decision.decision import Decision
from qualification.decision.model_shapes import experts_shape
from qualification.model.config import ExpertsConfig, ModelConfig
from server.model.experts import ExpertProducts
from server.protocol.messages import AttentionUse, DispatchCount


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """A decision with what is needed to run it, resolved once."""

    decision: Decision[ExpertsShape]
    path: ExpertsPath
    run: RunExperts
    use: AttentionUse


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Layers of equal mixtures, and their choice for each bucket of tokens, the fewest first."""

    num_layers: int
    choices: tuple[ExpertsChoice, ...]

    def choice(self, num_tokens: int) -> ExpertsChoice:
        """Of more tokens than a step may have, which warm-up computes, the last one."""
        return next((it for it in self.choices if it.decision.shape.rows.holds(num_tokens)), self.choices[-1])


class ExpertsTable:
    """The decisions of the plan for a model's mixtures. Nothing of it changes in service."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[ExpertsShape, Decision[ExpertsShape]],
        paths: Iterable[ExpertsPath] = EXPERTS_PATHS,
    ) -> None:
        """`config`: of this rank's part of the model. Every decision must have a path."""
        by_name = {path.name: path for path in paths}
        layers = Counter(it.feed_forward for it in config.layers if isinstance(it.feed_forward, ExpertsConfig))
        self._mixtures: dict[ExpertsConfig, _Mixture] = {}
        for mixture, num_layers in layers.items():
            shapes = (experts_shape(mixture, config.hidden_size, dtype, rows) for rows in ExpertRows)
            choices = (_resolved(decisions[shape], by_name) for shape in shapes if shape in decisions)
            self._mixtures[mixture] = _Mixture(num_layers, tuple(choices))

    @property
    def decisions(self) -> list[Decision[ExpertsShape]]:
        """Return the decision that serves each shape."""
        return list(dict.fromkeys(choice.decision for choice in self._choices()))

    @property
    def borders(self) -> tuple[int, ...]:
        """Return the first number of tokens of each bucket."""
        return tuple({choice.decision.shape.rows.lo + 1: None for choice in self._choices()})

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold every choice."""
        return all(choice.path.is_capturable for choice in self._choices())

    def products_of(self, mixture: ExpertsConfig, weights: AnyExpertWeights) -> ExpertProducts:
        """Return what computes the products of a layer, by the choice for the number of tokens."""
        of, activation = self._mixtures[mixture], mixture.activation

        def products(hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
            out = torch.empty_like(hidden)
            of.choice(hidden.shape[0]).run(hidden, experts, shares, weights, activation, out)
            return out

        return products

    def counts(self, num_tokens: int, num_sequences: int) -> list[DispatchCount]:
        """Return each decision that serves a step of so many tokens, with its launches: one a layer."""
        return [
            DispatchCount(
                phase=choice.use.phase,
                bucket=choice.decision.shape.rows.label,
                path=choice.use.path,
                status=choice.use.status,
                wanted=choice.decision.wanted,
                fallback_reasons=choice.use.fallback_reasons,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                num_launches=mixture.num_layers,
            )
            for mixture, choice in self._served(num_tokens)
        ]

    def uses(self, num_tokens: int) -> list[AttentionUse]:
        """Return what serves every sequence of a step of so many tokens."""
        return [choice.use for _, choice in self._served(num_tokens)]

    def pairs(self, num_tokens: int) -> list[tuple[str, str]]:
        """Return every (path, shape) of a step: whom to blame when the device is lost in it."""
        return [(choice.use.path, str(choice.decision.shape)) for _, choice in self._served(num_tokens)]

    def _served(self, num_tokens: int) -> list[tuple[_Mixture, ExpertsChoice]]:
        return [(mixture, mixture.choice(num_tokens)) for mixture in self._mixtures.values()]

    def _choices(self) -> list[ExpertsChoice]:
        return [choice for mixture in self._mixtures.values() for choice in mixture.choices]


def _resolved(decision: Decision[ExpertsShape], by_name: Mapping[str, ExpertsPath]) -> ExpertsChoice:
    assert decision.path is not None, "the start is refused where a shape has no path"
    path = by_name[decision.path]
    assert path.run is not None
    reasons = [reason.value for reason in decision.fallback_reasons]
    use = AttentionUse(phase_of(decision.shape), decision.path, decision.status.value, reasons)
    return ExpertsChoice(decision, path, path.run, use)
