"""The draft head: a layer behind the model that predicts a token more, of which nothing that is served is made."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import rms_norm
from kernels.linear.epilogue import Epilogue
from qualification.model.config import ModelConfig
from qualification.model.draft_head import draft_head_of
from server.model.decoder import Decoder, LayerObserver, Operators
from server.model.layers import Weights
from server.model.linear import WeightName
from server.model.step import Step


class DraftHead:
    """The head of a model, over pages of its own: those of the last layer of a `KVCache`."""

    def __init__(self, main: Decoder, config: ModelConfig, weights: Weights, operators: Operators) -> None:
        """`config`, `weights`: of the model with its head, or of one rank's part of both; `main`: without the head."""
        own = weights.draft
        assert own is not None, "the weights have a draft head"
        alone = replace(weights, layers=weights.layers[-1:], final_norm=own.norm, draft=None)
        self.layer = Decoder(draft_head_of(config), alone, main.ranks, operators, ropes=main.ropes)
        self.attention = self.layer.config.attentions[0]
        self._embedding = weights.embedding
        self._product = operators.product(None, WeightName.DRAFT_INPUT, own.product, Epilogue.NONE)
        is_centred = config.zero_centred_norms
        norms = (own.embedding_norm, own.hidden_norm)
        self._embedding_norm, self._hidden_norm = (it.float() + 1 if is_centred else it for it in norms)
        self._eps = config.norm_eps

    @torch.inference_mode()
    def forward(self, step: Step, hidden: Tensor, observer: LayerObserver | None = None) -> Tensor:
        """Return hidden states [T, hidden] before the head's last norm, which `normed` and `logits` apply.

        step    of token p its position and place p, and the id of token p + 1
        hidden  [T, hidden]: the model's output of token p behind its last norm, or what the head has made in its place
        """
        return self.layer.through(self.read(step.token_ids, hidden), step, observer)

    def read(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return what the layer reads [T, hidden]."""
        embedded = rms_norm(F.embedding(token_ids, self._embedding), self._embedding_norm, self._eps)
        both = torch.cat((embedded, rms_norm(hidden, self._hidden_norm, self._eps)), dim=1)
        return self._product(both, None)

    def normed(self, hidden_rows: Tensor) -> Tensor:
        """Return hidden states [R, hidden] behind the last norm: what the head reads of a token that it has drafted."""
        return self.layer.normed(hidden_rows)

    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] fp32 of hidden states [R, hidden], in `out` where it is given."""
        return self.layer.logits(hidden_rows, out)
