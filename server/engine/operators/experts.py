"""Products of a mixture's experts by the plan's decisions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts
from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath, RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision
from qualification.decision.model_shapes import experts_shape
from qualification.model.config import ExpertsConfig, ModelConfig
from server.engine.operators.rows_table import Calls, RowsTable
from server.engine.operators.table import TableOptions
from server.model.experts import ExpertProducts


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """Tensors that one layer's experts read and wrote.

    hidden, out      [T, H]
    experts, shares  [T, k]: the experts of each token, and their weights in fp32
    """

    hidden: Tensor
    experts: Tensor
    shares: Tensor
    weights: AnyExperts
    mixture: ExpertsConfig
    out: Tensor


class ExpertsTable(RowsTable[ExpertsShape, RunExperts]):
    """The decisions for a model's mixtures."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        decisions: Mapping[ExpertsShape, Decision[ExpertsShape]],
        paths: Iterable[ExpertsPath] = EXPERTS_PATHS,
        **options: Unpack[TableOptions[ExpertsShape]],
    ) -> None:
        """`config`: of this rank's part of the model. A shape without a path raises NoPathError."""
        super().__init__(Operator.EXPERTS, decisions, paths, reports_all=True, **options)
        mixtures = [(i, it.feed_forward) for i, it in enumerate(config.layers)]
        self.layers = tuple(i for i, it in mixtures if isinstance(it, ExpertsConfig))
        self._of_mixture: dict[ExpertsConfig, Calls[ExpertsShape]] = {}
        for _, mixture in mixtures:
            if isinstance(mixture, ExpertsConfig):
                every = (experts_shape(mixture, config.hidden_size, dtype, rows) for rows in TokenRows)
                self._of_mixture[mixture] = self.add(shape for shape in every if shape in decisions)

    def products_of(self, mixture: ExpertsConfig, weights: AnyExperts, *, is_of_head: bool = False) -> ExpertProducts:
        """Return what computes the products of a layer, by the choice for the number of tokens.

        `is_of_head`: of the draft head's layer, whose mixture is one of the model's; called once for it.
        """
        calls, activation = self._of_mixture[mixture], mixture.activation
        if is_of_head:
            self.add(calls.shapes, num_launches=0, num_of_head=1)

        def products(hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
            out = torch.empty_like(hidden)
            choice = self.launch(calls, hidden.shape[0], hidden, experts, shares, weights, activation, out)
            if self.tap is not None:
                self.tap(choice, ExpertsCall(hidden, experts, shares, weights, mixture, out))
            return out

        return products
