"""The draft head of Qwen 3 Next and Qwen 3.5 (MTP), plainly: a layer that attends, behind a model's last norm.

fc of [norm of the next token's embedding, norm of the model's output], the layer, a norm of its own, the model's head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qualification.model.config import ModelConfig
from qualification.model.forward.bounded import Bounded, chunks_of, product, rms_norm
from qualification.model.forward.layer import LayerReference
from qualification.model.forward.matrix import Inputs, Matrix
from qualification.model.forward.model import ForwardReference

_PREFIX = "mtp."


class HeadReference(ForwardReference):
    """The head as a model of one layer, of the same files as `main`.

    given  ids [T] of the tokens behind those that are computed, and the model's output for these [T, hidden] before
           its last norm: what `embedded` computes with, of which token ids alone say nothing
    """

    def __init__(self, main: ForwardReference, model: ModelConfig) -> None:
        """`model`: of the head's layer alone."""
        self.model, self.sentence, self.precision = model, main.sentence, main.precision
        self.context, self.ranks, self.checkpoint = main.context, main.ranks, main.checkpoint
        self._main = main
        self.given: tuple[Tensor, Tensor] | None = None

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Bounded:
        """Return what the layer reads [T, hidden], for as many tokens as `given` has."""
        assert self.given is not None, "what the layer is computed of is known"
        assert token_ids.shape == self.given[0].shape, "of each token the next one is given"
        next_ids, hidden = self.given
        parts = (
            self._normed(self._main.embedded(next_ids, positions + 1), "pre_fc_norm_embedding"),
            self._normed(self._main.final_norm(Bounded.exact(hidden)), "pre_fc_norm_hidden"),
        )
        names = ("truth", "most", "deviation")
        both = Bounded(*(torch.cat([getattr(it, name) for it in parts], dim=1) for name in names))
        weight = self.precision.stored(self.checkpoint.tensor(f"{_PREFIX}fc.weight"))
        return self.precision.rounded(product(both, chunks_of(weight), None, self.precision))

    def layers(self) -> Iterator[LayerReference]:
        prefix = f"{_PREFIX}layers.0."
        reading = self.checkpoint.begin(self.checkpoint.names(prefix))
        tensors = {name.removeprefix(prefix): it for name, it in reading.items()}
        yield LayerReference(
            self.model, self.model.layers[0], self.sentence, tensors, self.precision, self.context, self.ranks
        )

    def final_norm(self, hidden: Bounded) -> Bounded:
        return self._normed(hidden, "norm")

    def _head(self, name: str, inputs: Inputs) -> Matrix:
        if not self.model.rounds_draft_logits:
            return super()._head(name, inputs)
        return Matrix(self.precision.stored(self.checkpoint.tensor(f"{name}.weight")), inputs, rounds=True)

    def _normed(self, x: Bounded, name: str) -> Bounded:
        weight = self.precision.stored(self.checkpoint.tensor(f"{_PREFIX}{name}.weight"))
        return rms_norm(x, weight + self.sentence.norm_offset, self.model.norm_eps, self.precision)
