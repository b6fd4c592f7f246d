"""A model, from its config.json as data and its files: embedding, layers, logits."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qualification.model.config import ModelConfig
from qualification.model.forward.bounded import Bounded, Precision, U, chunks_of, in_fp32, layer_norm, product, rms_norm
from qualification.model.forward.checkpoint import Checkpoint, CheckpointError
from qualification.model.forward.indexer import chosen_keys
from qualification.model.forward.layer import LayerReference
from qualification.model.forward.matrix import Inputs, Matrix
from qualification.model.forward.sentences import SENTENCES

_HEAD_ROWS = 2**14  # of the head that are read at once


class ForwardReference:
    """The forward pass of a checkpoint, in sections that are held to what a served model hands out.

    dtype    that weights and results are stored in by what is checked
    context  positions that it serves, by which LongRoPE chooses its factors
    ranks    that share its sums
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        context: int | None = None,
        ranks: int = 1,
    ) -> None:
        """Raises CheckpointError where files cannot be read, or no definition of the family is written down."""
        if model.family not in SENTENCES:
            raise CheckpointError(f"no definition of {model.family} is written in qualification/model/forward")
        self.model = model
        self.sentence = SENTENCES[model.family]
        self.precision = Precision(dtype)
        self.context = model.max_position if context is None else context
        self.ranks = ranks
        self.checkpoint = Checkpoint(folder, device, self.sentence.embedding, self.sentence.layers)

    def close(self) -> None:
        """End what reads files."""
        self.checkpoint.close()

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Bounded:
        """Return the residual [T, hidden] of token ids [T] at positions [T] before the first layer."""
        rows = self.checkpoint.picked_rows(self.checkpoint.embedding, token_ids)
        found = Bounded.exact(self.precision.stored(rows))
        if self.sentence.embedding_is_normed:
            ones = torch.ones(self.model.hidden_size, dtype=torch.float64, device=token_ids.device)
            found = rms_norm(found, ones, self.model.norm_eps, self.precision)
        scale = in_fp32(self.model.embedding_scale)
        if self.sentence.embedding_is_scaled_by_width:
            scale = float(torch.tensor(self.model.hidden_size**0.5, dtype=self.precision.dtype))
        found = found if scale == 1 else self.precision.rounded(found.times(scale))
        if self.sentence.positions is None:
            return found
        places = positions + self.sentence.first_position
        rows = self.checkpoint.picked_rows(f"{self.checkpoint.prefix}{self.sentence.positions}.weight", places)
        return self.precision.rounded(found.plus(Bounded.exact(self.precision.stored(rows))))

    def per_layer(self, token_ids: Tensor, embedded: Bounded) -> Bounded | None:
        """Return what token ids [T] give to each layer, [T, layers, width]; None where a model has no such embeddings.

        embedded  [T, hidden], the residual before the first layer
        """
        if self.model.per_layer is None:
            return None
        prefix, width, hidden = self.checkpoint.prefix, self.model.per_layer.width, self.model.hidden_size
        weight = self.precision.stored(self.checkpoint.tensor(f"{prefix}per_layer_model_projection.weight"))
        made = self.precision.rounded(product(embedded, chunks_of(weight), None, self.precision))
        made = self.precision.rounded(made.times(hidden**-0.5)).changed(lambda it: it.view(len(it), -1, width))
        norm = self.precision.stored(self.checkpoint.tensor(f"{prefix}per_layer_projection_norm.weight"))
        normed = rms_norm(made, norm + self.sentence.norm_offset, self.model.norm_eps, self.precision)
        rows = self.checkpoint.picked_rows(f"{prefix}embed_tokens_per_layer.weight", token_ids)
        scale = float(torch.tensor(width**0.5, dtype=self.precision.dtype))
        own = self.precision.rounded(Bounded.exact(self.precision.stored(rows)).times(scale))
        both = self.precision.rounded(normed.plus(own.changed(lambda it: it.view(len(it), -1, width))))
        return self.precision.rounded(both.times(2**-0.5))

    def layers(self) -> Iterator[LayerReference]:
        """Read one layer after the other, each while the one before is computed."""
        prefixes = [
            f"{self.checkpoint.prefix}{self.sentence.layers}.{index}." for index in range(self.model.num_layers)
        ]
        names = [self.checkpoint.names(prefix) for prefix in prefixes]
        coming = self.checkpoint.begin(names[0]) if names else {}
        for index, config in enumerate(self.model.layers):
            own, prefix = coming, prefixes[index]
            coming = self.checkpoint.begin(names[index + 1]) if index + 1 < len(names) else {}
            tensors = {name.removeprefix(prefix): reading for name, reading in own.items()}
            yield LayerReference(self.model, config, self.sentence, tensors, self.precision, self.context, self.ranks)

    def final_norm(self, hidden: Bounded) -> Bounded:
        """Return what the head reads, of hidden states [R, hidden]."""
        name = f"{self.checkpoint.prefix}{self.sentence.final_norm}"
        if self.sentence.norms_have_weights:
            weight = self.precision.stored(self.checkpoint.tensor(f"{name}.weight"))
        else:
            weight = torch.ones(self.model.hidden_size, dtype=torch.float64, device=hidden.truth.device)
        own = self.sentence.final_norm_offset
        weight = weight + (self.sentence.norm_offset if own is None else own)
        if not self.sentence.subtracts_mean(config_says=self.model.norms_subtract_mean):
            return rms_norm(hidden, weight, self.model.norm_eps, self.precision)
        bias = None
        if self.sentence.norms_add_biases:
            bias = self.precision.stored(self.checkpoint.tensor(f"{name}.bias"))
        return layer_norm(hidden, weight, self.model.norm_eps, self.precision, bias)

    def logits(self, hidden: Bounded) -> Bounded:
        """Return the logits [R, vocab] of hidden states [R, hidden] before the final norm."""
        head = self.checkpoint.head or self.checkpoint.embedding
        read = self.final_norm(hidden)

        def rows() -> Iterator[Tensor]:
            for start in range(0, self.model.vocab_size, _HEAD_ROWS):
                stop = min(start + _HEAD_ROWS, self.model.vocab_size)
                yield self.precision.stored(self.checkpoint.tensor(head, range(start, stop)))

        inputs = Inputs.of(self.model.head_format.name)
        if inputs is Inputs.AS_THEY_ARE:
            found = product(read, rows, None, self.precision)
        else:
            found = self._head(head.removesuffix(".weight"), inputs).product(read, None, self.precision)
        found = self.precision.rounded(found)  # a CPU rounds them
        if self.checkpoint.has("lm_head.bias"):
            found = found.plus(Bounded.exact(self.precision.stored(self.checkpoint.tensor("lm_head.bias"))))
            found = Bounded(found.truth, found.most + U * found.truth.abs(), found.deviation)  # the sum is of fp32
        found = found.times(1 / self.model.logits_divisor)
        cap = self.model.logits_softcap
        if cap is None:
            return found
        bent = (found.truth / cap).tanh()
        return Bounded(cap * bent, found.most + 4 * U * cap, found.deviation)

    def _head(self, name: str, inputs: Inputs) -> Matrix:
        """Return the head of 8 bits."""
        read = self.checkpoint.tensor
        input_scale = read(f"{name}.input_scale") if inputs is Inputs.ALL else None
        return Matrix.of_file(read(f"{name}.weight"), read(f"{name}.weight_scale"), inputs, input_scale)


def forward(reference: ForwardReference, token_ids: Tensor) -> Tensor:
    """Return the logits [T, vocab] fp64 of one sequence, computed whole: every section reads the one before it."""

    def truth(value: Bounded) -> Bounded:
        return Bounded.exact(value.truth)

    positions = torch.arange(token_ids.shape[0], device=token_ids.device)
    hidden = truth(reference.embedded(token_ids, positions))
    given = reference.per_layer(token_ids, hidden)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    chosen: Tensor | None = None  # by the latest layer with an indexer
    for index, layer in enumerate(reference.layers()):
        if layer.config.mixer is None:
            behind = hidden
        elif layer.config.attends:
            read = truth(layer.attention_read(hidden))
            source = layer.attention.reads_keys_of
            if source is None:
                q, k, v = (it.truth for it in layer.heads(read, positions))
                kept[index] = k, v
            else:
                q, (k, v) = layer.queries(read, positions).truth, kept[source]
            if layer.indexer is not None:
                index_q, weights = (it.truth for it in layer.index(read, positions))
                chosen = chosen_keys(index_q, weights, k[:, 0, q.shape[2] :], layer.indexer.count)
            out = truth(layer.attend(q, k, v, chosen=chosen))
            if layer.beside is None:
                behind = truth(layer.after_attention(hidden, out, read))
            else:
                projected, gates = (truth(it) for it in layer.beside.recurrent_input(read, positions))
                mixed = truth(layer.beside.mix(projected.truth, gates.truth))
                behind = truth(layer.after_both(hidden, out, read, mixed, projected))
        elif layer.convolves:
            projected = truth(layer.convolution_read(truth(layer.attention_read(hidden))))
            behind = truth(layer.after_convolution(hidden, truth(layer.convolve(projected.truth))))
        else:
            read = truth(layer.attention_read(hidden))
            projected, gates = (truth(it) for it in layer.recurrent_input(read, positions))
            mixed = truth(layer.mix(projected.truth, gates.truth))
            behind = truth(layer.after_recurrence(hidden, mixed, projected))
        if layer.config.feed_forward is not None:
            behind = layer.after_feed_forward(behind, truth(layer.feed_forward_read(hidden, behind))).residual
        hidden = truth(behind)
        own = None if given is None else Bounded.exact(given.truth[:, index])
        hidden = truth(layer.finished(hidden, own))
    return reference.logits(hidden).truth
