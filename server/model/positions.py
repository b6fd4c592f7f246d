"""Learned positions: what a model adds to the embedding of each token before its first layer."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from server.model.step import Step


@dataclass(frozen=True, slots=True)
class AddPositions:
    """table [positions, hidden]: the embedding of each position, from that of the first one on."""

    table: Tensor

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return hidden [T, hidden] with the embedding of each token's position, in place."""
        return hidden.add_(F.embedding(step.positions, self.table))


def no_positions(hidden: Tensor, _: Step) -> Tensor:
    """Return the embeddings of a model that adds no positions, as they are."""
    return hidden
