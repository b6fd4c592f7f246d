"""The check of the layers: each section of each layer of the served model is held to the plain forward pass.

Both get the same input, so that an error is named where it is made. docs/limits.md ("Layers") derives the limits. A
check of an 8B on an H200 reads its files once more, layer by layer.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.calls.indexed import Index
from kernels.reference.choice import chosen_mask, why_wrong_choice
from qualification.model.forward.bounded import Bounded, Precision
from qualification.model.forward.fp8_cache import stored_in_fp8
from qualification.model.forward.layer import LayerReference
from qualification.model.forward.model import ForwardReference
from server.engine.operators.observation import Border, Observation
from server.engine.proof.layer_steps import CheckedRow, CheckedStep
from server.engine.proof.seen_spans import why_other_spans
from server.engine.scheduling.sequence import Batch

MOST_FACTOR = 1e9  # reported for numbers that are not finite too: JSON has none
SPANS = "spans of images in a step"
_MOST_LOGITS = 4  # rows of the head
_OF_INDEXER = Border.INDEX_QUERIES, Border.INDEX_WEIGHTS
_BEHIND = Border.RESIDUAL_BEHIND_FEED_FORWARD.value


class Observed(Protocol):
    """Runs steps of the served model."""

    def observe(self, batch: Batch) -> tuple[Tensor, Observation]:
        """Run a batch; return the hidden states [T, hidden] of its tokens and what its layers handed out."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest share of a limit that a section's numbers are off.

    section  of the layer, or "embedding", "logits"; of heads with the rank that has them, where there are several
    layer    None outside of all layers
    row      of the token, which names the phase
    detail   in the place of the three numbers, where no number is wrong
    """

    section: str
    layer: int | None
    row: str
    factor: float
    error: float
    limit: float
    detail: str | None = None

    def __str__(self) -> str:
        where = self.section if self.layer is None else f"layer {self.layer}, {self.section}"
        if self.detail is not None:
            return f"{where}, in {self.row}: {self.detail}"
        size = f"{self.factor:.3g} times its limit"
        return f"{where}, in {self.row}: off by {self.error:.3g}, {size} of {self.limit:.3g}"


def difference(section: str, layer: int | None, row: str, served: Tensor, expected: Bounded) -> Difference:
    """Return the largest difference of numbers that are all of one row."""
    error, limit = (served.double() - expected.truth).abs(), expected.limit
    share = torch.where(error == 0, 0.0, error / limit).nan_to_num(math.inf, math.inf).flatten()
    worst = int(share.argmax())
    off, most = (float(it.flatten()[worst]) for it in (error, limit))
    return Difference(section, layer, row, min(float(share[worst]), MOST_FACTOR), off, most)


@dataclass(frozen=True, slots=True)
class LayersChecked:
    """The result: the first difference beyond its limit, and the largest of all.

    num_numbers   that were compared
    num_unjudged  tokens of mixtures whose experts a right router may choose otherwise, summed over layers
    """

    first: Difference | None
    largest: Difference
    num_layers: int
    num_numbers: int
    num_unjudged: int
    seconds: float


class LayerCheck:
    """Runs steps and judges what their layers hand out."""

    def __init__(
        self,
        runner: Observed,
        reference: ForwardReference,
        logits: Callable[[Tensor], Tensor] | None,
        *,
        kv_dtype: torch.dtype,
        progress: Callable[[int, int], None] = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`logits`: of hidden states [R, hidden]; None for a model without a head. `progress` gets layers done, all."""
        self._runner = runner
        self._reference = reference
        self._logits = logits
        self._kv_dtype = kv_dtype
        self._progress = progress
        self._clock = clock

    @torch.inference_mode()
    def run(self, steps: Sequence[CheckedStep]) -> LayersChecked:
        """Run the steps, and compare. Waits for the device. Raises what a step raises, and CheckpointError."""
        started_at, reference = self._clock(), self._reference
        seen = _Seen([self._runner.observe(step.batch) for step in steps], steps, reference)
        found: list[Difference] = list(self._of_spans(seen))
        numbers = unjudged = 0
        for section in self._sections(seen):
            found += section.differences(seen.rows)
            numbers += section.served.numel()
            unjudged += 0 if section.is_judged is None else int((~section.is_judged).sum())
        return LayersChecked(
            first=next((it for it in found if it.factor > 1), None),
            largest=max(found, key=lambda it: it.factor),
            num_layers=reference.model.num_layers,
            num_numbers=numbers,
            num_unjudged=unjudged,
            seconds=self._clock() - started_at,
        )

    def _of_spans(self, seen: "_Seen") -> "Iterator[Difference]":
        """Yield where a step has told paths other spans than its prompts have: no path is to blame for what follows."""
        windows = {it.window for it in self._reference.model.attentions if it.sees_spans}
        for row, spans in seen.spans() if windows else ():
            first, num_rows = row.positions.start, len(row.positions)
            for window in windows:
                if (detail := why_other_spans(spans, row.spans, first, num_rows, window)) is not None:
                    yield Difference(SPANS, None, row.name, MOST_FACTOR, 0.0, 0.0, detail)

    def _sections(self, seen: "_Seen") -> "Iterator[_Section | _ChoiceSection]":
        """Yield the sections in the order of the forward pass."""
        reference, num_layers = self._reference, self._reference.model.num_layers
        embedded = reference.embedded(seen.token_ids, seen.positions)
        yield _Section("embedding", None, seen.behind(None), embedded)
        given = reference.per_layer(seen.token_ids, Bounded.exact(seen.behind(None)))
        for index, layer in enumerate(reference.layers()):
            if layer.config.num_sublayers:
                yield from self._of_layer(index, layer, seen, given)
            self._progress(index + 1, num_layers)
        if self._logits is not None:
            ends = torch.tensor([row.tokens[-1] for row in seen.rows[-_MOST_LOGITS:]], device=seen.hidden.device)
            rows = seen.hidden.index_select(0, ends)
            names = tuple(row.name for row in seen.rows[-_MOST_LOGITS:])
            yield _Section("logits", None, self._logits(rows), reference.logits(Bounded.exact(rows)), names=names)

    def _of_layer(
        self, index: int, layer: LayerReference, seen: "_Seen", given: Bounded | None
    ) -> "Iterator[_Section | _ChoiceSection]":
        """Yield one layer's sections; `given`: what the tokens give to all layers."""
        residual = seen.exact(index, Border.RESIDUAL)
        if layer.config.mixer is not None:
            yield from self._of_mixer(index, layer, seen, residual)
        if layer.config.feed_forward is None:
            return
        middle = seen.exact(index, Border.RESIDUAL_BEHIND_ATTENTION)
        read = layer.feed_forward_read(residual, middle)
        yield _Section(Border.FEED_FORWARD_READ.value, index, seen.at(index, Border.FEED_FORWARD_READ), read)
        fed = layer.after_feed_forward(middle, seen.exact(index, Border.FEED_FORWARD_READ))
        if given is None and layer.sentence.scale is None:
            yield _Section(_BEHIND, index, seen.behind(index), fed.residual, fed.is_judged)
            return
        yield _Section(_BEHIND, index, seen.at(index, Border.RESIDUAL_BEHIND_FEED_FORWARD), fed.residual, fed.is_judged)
        own = None if given is None else given.changed(lambda it: it[:, index])
        finished = layer.finished(seen.exact(index, Border.RESIDUAL_BEHIND_FEED_FORWARD), own)
        yield _Section("residual behind the layer", index, seen.behind(index), finished)

    def _of_mixer(
        self, index: int, layer: LayerReference, seen: "_Seen", residual: Bounded
    ) -> "Iterator[_Section | _ChoiceSection]":
        """Yield the sections of a layer up to the residual behind what mixes its tokens."""
        read = seen.exact(index, Border.ATTENTION_READ)

        def section(border: Border, expected: Bounded, tokens: Tensor | None = None) -> _Section:
            served = seen.at(index, border)
            return _Section(border.value, index, served if tokens is None else served[tokens], expected, tokens=tokens)

        yield section(Border.ATTENTION_READ, layer.attention_read(residual))
        if layer.config.attends:
            yield from self._of_attention(index, layer, seen, read)
            attended = seen.exact(index, Border.ATTENDED)
            if layer.beside is None:
                behind = layer.after_attention(residual, attended, read)
            else:
                yield from self._of_recurrence(index, layer.beside, seen, read)
                made = (seen.exact(index, it) for it in (Border.RECURRED, Border.RECURRENT_INPUT))
                behind = layer.after_both(residual, attended, read, *made)
        elif layer.convolves:
            yield section(Border.CONVOLUTION_READ, layer.convolution_read(read))
            yield from self._by_sequence(index, seen, Border.CONVOLVED, (Border.CONVOLUTION_READ,), layer.convolve)
            behind = layer.after_convolution(residual, seen.exact(index, Border.CONVOLVED))
        else:
            yield from self._of_recurrence(index, layer, seen, read)
            mixed, projected = (seen.exact(index, it) for it in (Border.RECURRED, Border.RECURRENT_INPUT))
            behind = layer.after_recurrence(residual, mixed, projected)
        if layer.config.feed_forward is None:
            yield _Section(Border.RESIDUAL_BEHIND_ATTENTION.value, index, seen.behind(index), behind)
        else:
            yield section(Border.RESIDUAL_BEHIND_ATTENTION, behind)

    def _of_recurrence(
        self, index: int, layer: LayerReference, seen: "_Seen", read: Bounded
    ) -> "Iterator[_Section | _ChoiceSection]":
        projected, gates = layer.recurrent_input(read, seen.positions)
        yield _Section(Border.RECURRENT_INPUT.value, index, seen.at(index, Border.RECURRENT_INPUT), projected)
        if gates.truth.shape[1]:
            yield _Section(Border.RECURRENT_GATES.value, index, seen.at(index, Border.RECURRENT_GATES), gates)
        given = Border.RECURRENT_INPUT, Border.RECURRENT_GATES
        yield from self._by_sequence(index, seen, Border.RECURRED, given, layer.mix)

    def _of_attention(
        self, index: int, layer: LayerReference, seen: "_Seen", read: Bounded
    ) -> "Iterator[_Section | _ChoiceSection]":
        def section(border: Border, expected: Bounded) -> _Section:
            served = seen.at(index, border)
            return _Section(border.value, index, served, expected, num_ranks=self._reference.ranks)

        source = layer.attention.reads_keys_of
        if source is None:
            q, k, v = layer.heads(read, seen.positions)
            k, v = self._stored(k, layer), self._stored(v, layer)
        else:  # to the bit what the earlier layer has in its pages
            q = layer.queries(read, seen.positions)
            k, v = seen.exact(source, Border.KEYS), seen.exact(source, Border.VALUES)
        yield section(Border.QUERIES, q)
        yield section(Border.KEYS, k)
        yield section(Border.VALUES, v)
        if layer.indexer is not None:
            for border, expected in zip(_OF_INDEXER, layer.index(read, seen.positions), strict=True):
                yield _Section(border.value, index, seen.at(index, border), expected)
        yield from self._attention(index, layer, seen)

    def _by_sequence(
        self, index: int, seen: "_Seen", border: Border, given: tuple[Border, ...], expect: Callable[..., Bounded]
    ) -> "Iterator[_Section | _ChoiceSection]":
        """Compare each sequence's results from its first token on, whatever steps and slots computed it.

        expect  of what a sequence's tokens have at the borders `given`: its results
        """
        out, inputs = seen.at(index, border), [seen.at(index, it) for it in given]
        found: dict[tuple[int, ...], Bounded] = {}
        for row in sorted(seen.rows, key=lambda it: -len(it.keys or ())):
            if row.keys is None:
                continue
            whole = next((it for it in found if it[: len(row.keys)] == row.keys), row.keys)
            if whole not in found:
                places = torch.tensor(whole, device=out.device)
                found[whole] = expect(*(it[places] for it in inputs))
            expected = found[whole].rows(torch.tensor(list(row.positions), device=out.device))
            own = slice(row.tokens.start, row.tokens.stop)
            yield _Section(border.value, index, out[own], expected, names=(row.name,) * len(row.tokens))

    def _attention(self, index: int, layer: LayerReference, seen: "_Seen") -> "Iterator[_Section | _ChoiceSection]":
        q, keys, values = (seen.at(index, it) for it in (Border.QUERIES, Border.KEYS, Border.VALUES))
        out = seen.at(index, Border.ATTENDED)
        chosen = seen.choice(index)
        for row in seen.rows:
            if row.keys is None or (row.is_behind_copies and layer.attention.chunk is None):
                continue
            places = torch.tensor(row.keys, device=q.device)
            own = slice(row.tokens.start, row.tokens.stop)
            k, v = keys[places], values[places]
            if self._is_in_fp8(layer) and len(row.tokens) == len(row.keys):
                k, v = k.to(layer.precision.dtype), v.to(layer.precision.dtype)  # read beside the pages, in the model's
            mask = None
            if chosen is not None:
                mask = chosen_mask(chosen[own], len(row.keys))
                yield _ChoiceSection(chosen[own], index, row.name, self._why_wrong(index, layer, seen, row, k))
            expected = layer.attend(q[own], k, v, row.spans, chosen=mask)
            names, num_ranks = (row.name,) * len(row.tokens), self._reference.ranks
            yield _Section(Border.ATTENDED.value, index, out[own], expected, names=names, num_ranks=num_ranks)

    def _why_wrong(self, index: int, layer: LayerReference, seen: "_Seen", row: CheckedRow, keys: Tensor) -> str | None:
        """Return what no right kernel chooses of a row's keys [n, 1, d], or what is not the earlier layer's choice."""
        own, chosen = slice(row.tokens.start, row.tokens.stop), seen.choice(index)
        assert chosen is not None, "the layer attends to chosen keys"
        if layer.indexer is None:
            source = self._reference.model.layer_that_chooses_for(index)
            is_same = torch.equal(chosen[own], seen.at(source, Border.CHOICE)[own])
            return None if is_same else f"another choice than that of layer {source} is read"
        made = Index(chosen[own], *(seen.at(index, border)[own] for border in _OF_INDEXER))
        of_indexer = keys[:, 0, layer.attention.head_dim :]
        error = why_wrong_choice(made, of_indexer, torch.tensor(row.positions, device=chosen.device))
        return None if error is None else error.detail

    def _stored(self, value: Bounded, layer: LayerReference) -> Bounded:
        """Return keys or values as they are in their pages."""
        if self._is_in_fp8(layer):
            return stored_in_fp8(value)
        is_rounded = self._kv_dtype not in (layer.precision.dtype, torch.float8_e4m3fn)
        return Precision(self._kv_dtype).rounded(value) if is_rounded else value

    def _is_in_fp8(self, layer: LayerReference) -> bool:
        return self._kv_dtype is torch.float8_e4m3fn and not layer.attention.skips_fp8_cache


@dataclass(frozen=True, slots=True)
class _Section:
    """Numbers that the model handed out, and what they should be; the first dim is of tokens.

    is_judged  [T]; None: all are
    tokens     which of all tokens these are; None: all of them
    names      of the rows that they belong to, where they are not all tokens
    num_ranks  that have equal parts of the second dim, which is of heads then
    """

    name: str
    layer: int | None
    served: Tensor
    expected: Bounded
    is_judged: Tensor | None = None
    tokens: Tensor | None = None
    names: tuple[str, ...] | None = None
    num_ranks: int = 1

    def differences(self, rows: Sequence[CheckedRow]) -> list[Difference]:
        """Return the largest difference of the section."""
        limit = self.expected.limit
        error = (self.served.double() - self.expected.truth).abs()
        share = torch.where(error == 0, 0.0, error / limit).nan_to_num(math.inf, math.inf).flatten(1)
        if self.is_judged is not None:
            share = share.masked_fill(~self.is_judged[:, None], 0.0)
        worst = int(share.argmax())
        token, place = divmod(worst, share.shape[1])
        names = self.names
        name = names[token] if names is not None else next(it.name for it in rows if token in it.tokens)
        factor = min(float(share.view(-1)[worst]), MOST_FACTOR)
        off, most = (float(it.flatten(1)[token, place]) for it in (error, limit))
        return [Difference(self._named(place), self.layer, name, factor, off, most)]

    def _named(self, place: int) -> str:
        """Return the section's name, of several ranks with the one that has the head of this place."""
        if self.num_ranks == 1:
            return self.name
        num_heads, head_dim = self.served.shape[1:]
        return f"{self.name} of rank {place // head_dim * self.num_ranks // num_heads}"


@dataclass(frozen=True, slots=True)
class _ChoiceSection:
    """The choice of keys of one row, [T, count], and why it is wrong; it has no limit of numbers."""

    served: Tensor
    layer: int
    row: str
    why_wrong: str | None
    is_judged: Tensor | None = None

    def differences(self, rows: Sequence[CheckedRow]) -> list[Difference]:
        """Return the one difference, or none."""
        del rows
        if self.why_wrong is None:
            return []
        return [Difference(Border.CHOICE.value, self.layer, self.row, MOST_FACTOR, 0.0, 0.0, self.why_wrong)]


class _Seen:
    """Tensors that the steps have handed out, joined: the first dim of every tensor is of the tokens of all steps."""

    def __init__(
        self,
        observed: Sequence[tuple[Tensor, Observation]],
        steps: Sequence[CheckedStep],
        reference: ForwardReference,
    ) -> None:
        self.hidden = torch.cat([hidden for hidden, _ in observed])
        self.rows = tuple(row for step in steps for row in step.rows)
        device = self.hidden.device
        self.token_ids = torch.tensor([token for step in steps for token in step.token_ids], device=device)
        self.positions = torch.tensor([place for row in self.rows for place in row.positions], device=device)
        self._steps = steps
        self._observations = [observation for _, observation in observed]
        self._model = reference.model

    def at(self, layer: int, border: Border) -> Tensor:
        """Return the tensors at a border; KV heads once, also where several ranks have the same."""
        found = torch.cat([it.at(layer, border) for it in self._observations])
        if border in (Border.KEYS, Border.VALUES):
            num_heads = self._model.layers[layer].attention.num_kv_heads
            return found[:, :: found.shape[1] // num_heads]
        return found

    def spans(self) -> Iterator[tuple[CheckedRow, Tensor | None]]:
        """Yield what the steps have told paths of the spans of each row, [T, 2]."""
        for step, observation in zip(self._steps, self._observations, strict=True):
            first, spans = step.rows[0].tokens.start, observation.spans()
            for row in step.rows:
                own = slice(row.tokens.start - first, row.tokens.stop - first)
                yield row, None if spans is None else spans[own]

    def choice(self, layer: int) -> Tensor | None:
        """Return the keys that the layer attends to, [T, count]; None where it attends to all."""
        return self.at(layer, Border.CHOICE) if self._model.layers[layer].attention.reads_choice else None

    def exact(self, layer: int, border: Border) -> Bounded:
        """Return what the model handed out as the input of a section."""
        return Bounded.exact(self.at(layer, border))

    def behind(self, layer: int | None) -> Tensor:
        """Return the residual behind a layer; None for that before all layers."""
        first = 0 if layer is None else layer + 1
        later = (index for index in range(first, self._model.num_layers) if self._model.layers[index].num_sublayers)
        found = next(later, None)
        return self.hidden if found is None else self.at(found, Border.RESIDUAL)
