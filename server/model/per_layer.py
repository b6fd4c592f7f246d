"""Embeddings of tokens for each layer: what a step's tokens give to every layer, made once before the first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import rms_norm
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """(norm(product(x) / sqrt(hidden)) + sqrt(width) * embedding) / sqrt(2), of each token for each layer.

    embedding     [vocab, layers * width]
    product       x [T, hidden] -> [T, layers * width]
    norm          [width], of each layer's part
    absent_token  whose embedding stands for tokens that are given as embeddings
    """

    embedding: Tensor
    product: Product
    hidden_size: int
    norm: Tensor
    eps: float
    absent_token: int

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [T, layers, width] for the step's embeddings [T, hidden], given ones included."""
        width, token_ids = self.norm.shape[0], step.token_ids
        if step.embedding_rows is not None:
            token_ids = token_ids.masked_fill(step.embedding_rows > 0, self.absent_token)
        projected = self.product(hidden, step).mul_(self.hidden_size**-0.5)
        normed = rms_norm(projected.view(-1, width), self.norm, self.eps)
        scale = float(torch.tensor(width**0.5, dtype=self.embedding.dtype))  # as the embedding, rounded to its dtype
        own = F.embedding(token_ids, self.embedding).mul_(scale)
        return normed.view_as(own).add_(own).mul_(2**-0.5).view(len(token_ids), -1, width)
