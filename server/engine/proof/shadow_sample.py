"""One sample of served attention: what a path computed for one sequence and one KV head, and how it is judged.

The rule and the limits are those of qualification (kernels/reference/compare.py, docs/limits.md).
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, with_index
from kernels.calls.rows import SequenceRows, keys_of
from kernels.fp8_cache.pages import E4M3, dequantized_at
from kernels.reference.choice import why_wrong_choice
from kernels.reference.compare import Errors, errors_of, reference_of
from kernels.vocabulary.shape import Phase
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import PhasePart
from server.engine.proof.seen_spans import Places, seen_of, why_other_spans

LEAST_ROWS = 4
MOST_ROWS = 64
# Scores of one judgement, in fp64: beside the keys they are most of its memory and time. With one KV head of 128k keys
# and 4 query heads they leave 4 rows on a GPU.
_MAX_SCORES = {"cpu": 2**18, "cuda": 2**21}
_MOST_FACTOR = 1e9  # reported for an output that holds NaN or infinities too: JSON has neither
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Sample:
    """Copies of a call's tensors: the step after it may overwrite the originals.

    q, out   [queries, group, head_dim]: one sequence's rows in the query heads of one KV head
    k, v     [keys, 1, head_dim]: the sequence's keys and values of that KV head
    flags    of the layer, with the sinks of these heads, and spans by the places of the prompt's images
    images   of the sequence, whose tokens see each other in this layer
    spans    [queries, 2]: what the step has said of them to the path
    is_cut   whether the step has computed a part of an image's tokens that see each other
    index    of a layer that attends to chosen keys: what chose them, of these queries, and the choice; None of others.
             The keys then have the indexer's behind their own numbers, where it is the layer's
    """

    path: str
    phase: Phase
    layer: int
    kv_head: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    flags: AttentionFlags
    of_tower: bool = False
    images: Places = ()
    spans: Tensor | None = None
    is_cut: bool = False
    index: Index | None = None

    @property
    def lane(self) -> Phase:
        return self.phase

    @property
    def digest(self) -> str:
        """Return the digest of q: samples with the same digest repeat the same computation."""
        return digest_of(self.q)

    @property
    def weight(self) -> str | None:
        """Return where it is not attention of the text; attention has no weight."""
        return "tower_attention" if self.of_tower else None

    @torch.inference_mode()
    def judge(self, rng: Random) -> "Judgement":
        """Compute some rows of a sample in fp64 and compare. Waits for the device.

        Raises torch.OutOfMemoryError.
        """
        if (wrong := self._why_wrong_step()) is not None:
            detail = f"layer {self.layer}: {wrong}: the step is wrong, and not {self.path}"
            return Judgement(_MOST_FACTOR, self.q.shape[0], detail=detail, is_of_step=True)
        if (reason := _why_not_judged(self)) is not None:
            return Judgement(None, detail=reason)
        device, num_queries, num_keys = self.q.device, self.q.shape[0], self.k.shape[0]
        batch = AttentionBatch(
            cu_seqlens_q=torch.tensor([0, num_queries], dtype=torch.int32, device=device),
            cu_seqlens_k=torch.tensor([0, num_keys], dtype=torch.int32, device=device),
            max_seqlen_q=num_queries,
            max_context=num_keys,
        )
        rows = drawn_rows(num_queries, _most_rows(self), rng)
        chosen = torch.tensor(rows, device=device)
        if (error := self._why_wrong_choice(chosen)) is not None:
            detail = f"{self.path} {self.phase.value}, layer {self.layer}: {error}"
            return Judgement(_MOST_FACTOR, len(rows), detail=detail)
        flags = self.flags if self.index is None else with_index(self.flags, self.index)
        reference = reference_of(self.q, self.k, self.v, batch, flags, rows=chosen)
        return _judgement(self, rows, errors_of(self.out[chosen], reference))

    def _why_wrong_choice(self, rows: Tensor) -> str | None:
        """Return which of its keys the path may not have chosen for rows [n] of the queries; None where there is none.

        An earlier layer's choice was judged there.
        """
        if self.index is None or self.index.queries is None or self.index.weights is None:
            return None
        own = Index(self.index.chosen[rows], self.index.queries[rows], self.index.weights[rows])
        first = self.k.shape[0] - self.q.shape[0]
        error = why_wrong_choice(own, self.k[:, 0, self.q.shape[2] :], rows + first)
        return None if error is None else error.detail

    def _why_wrong_step(self) -> str | None:
        """Return what the step has told the path otherwise than the prompt's images are; None where it has not."""
        if self.is_cut:
            return "an image whose tokens see each other is cut in two"
        if not self.images and self.spans is None:
            return None
        num_rows = self.q.shape[0]
        first = self.k.shape[0] - num_rows
        return why_other_spans(self.spans, self.images, first, num_rows, self.flags.window)


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Judgement:
    """Distance of a sample from the truth.

    factor   the largest error as a share of its limit: above 1 the path is wrong; None where it was not computed
    head     the query head of the largest error; None for a product
    position the position of its query in the sequence; of a product its row in the step
    detail   in words, for a wrong output or a sample that could not be judged
    is_of_step  whether what the step has told the path is wrong, and not the path
    """

    factor: float | None
    num_rows: int = 0
    head: int | None = None
    position: int | None = None
    detail: str | None = None
    is_of_step: bool = False

    @property
    def is_mismatch(self) -> bool:
        return self.factor is not None and self.factor > 1


def take_sample(
    choice: Choice,
    part: PhasePart,
    layer: int,
    sequence: SequenceRows,
    *,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    flags: AttentionFlags,
    rng: Random,
    images: Places | None = None,
) -> Sample:
    """Copy one sequence and one KV head of a call, on the stream of the call and without waiting for the device.

    tensors  q, k, v and out of the call; k and v packed, or pages
    images   of the sequence, whose tokens see each other in this layer; None in a layer without such spans
    Raises torch.OutOfMemoryError.
    """
    q, k, v, out = tensors
    num_kv_heads = k.shape[-2]
    group = q.shape[1] // num_kv_heads
    kv_head = rng.randrange(num_kv_heads)
    heads = slice(kv_head * group, (kv_head + 1) * group)
    rows = slice(sequence.start, sequence.end)
    keys, values = (_keys_of(it, kv_head, part.batch, sequence) for it in (k, v))
    if not part.batch.is_paged:  # of pages they are copies already
        keys, values = keys.clone(), values.clone()
    own_flags = replace(
        flags,
        sinks=None if flags.sinks is None else flags.sinks[heads].clone(),
        spans=_spans_of(images or (), sequence, flags.window, q.device),
    )
    own_q, own_out = q[rows, heads].clone(), out[rows, heads].clone()
    edges = sequence.position(sequence.start), sequence.num_keys
    is_cut = any(start < edge < stop for start, stop in images or () for edge in edges)
    index = None
    if part.index is not None:
        of_rows = part.index.rows(rows)
        copies = (None if it is None else it.clone() for it in (of_rows.queries, of_rows.weights))
        index = Index(of_rows.chosen.clone(), *copies)
    of_step = None if part.spans is None or images is None else part.spans[rows].clone()
    return Sample(
        choice.use.path, part.phase, layer, kv_head, own_q, keys, values, own_out, own_flags,
        images=images or (), spans=of_step, is_cut=is_cut, index=index,
    )  # fmt: skip


def _spans_of(images: Places, sequence: SequenceRows, window: int | None, device: torch.device) -> Tensor | None:
    """Return the positions that each row sees of its own image, [rows, 2] int32; None where no row is an image's."""
    found = seen_of(images, sequence.position(sequence.start), sequence.num_queries, window)
    return found.to(device, non_blocking=True) if found.any() else None


def take_tower_sample(
    choice: Choice,
    batch: AttentionBatch,
    layer: int,
    *,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    flags: AttentionFlags,
    rng: Random,
) -> Sample:
    """Copy one image or window, drawn by its patches, and one head of a call of a tower's attention.

    tensors  q, k, v and out of the call, packed
    Waits for the device, to learn where the images end. Raises torch.OutOfMemoryError.
    """
    ends = batch.cu_seqlens_q.tolist()
    patch = rng.randrange(ends[-1])
    index = bisect_right(ends, patch) - 1
    rows, head = slice(ends[index], ends[index + 1]), rng.randrange(tensors[0].shape[1])
    q, k, v, out = (it[rows, head : head + 1].clone() for it in tensors)
    return Sample(choice.use.path, choice.decision.shape.phase, layer, head, q, k, v, out, flags, of_tower=True)


def _keys_of(k: Tensor, kv_head: int, batch: AttentionBatch, sequence: SequenceRows) -> Tensor:
    """Return a sequence's keys (or values) of one KV head, [keys, 1, head_dim], as a right kernel reads them."""
    of_head = k[..., kv_head : kv_head + 1, :]
    if of_head.dtype is not E4M3:
        return keys_of(of_head, batch, sequence)
    assert batch.page_table is not None, "a fresh prompt's keys are of the model's dtype"
    positions = torch.arange(sequence.num_keys, device=k.device)
    pages = batch.page_table[sequence.index].long()[positions // k.shape[1]]
    found = dequantized_at(k, pages, positions % k.shape[1], torch.float64)
    return found[:, kv_head : kv_head + 1].clone()


def blank_sample(
    *, group: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> Sample:
    """One query and one key of zeros: judged before ready, so that a GPU's libraries are loaded before a step waits."""
    kv_dtype = torch.float64 if kv_dtype is E4M3 else kv_dtype  # as `_keys_of` gives them
    q, k = (torch.zeros(1, n, head_dim, dtype=of, device=device) for n, of in ((group, dtype), (1, kv_dtype)))
    return Sample("none", Phase.PREFILL, 0, 0, q, k, k, torch.zeros_like(q), AttentionFlags(1.0))


def drawn_rows(num_rows: int, most: int, rng: Random) -> list[int]:
    """Draw at most `most` of the rows, ascending: one from each of as many equal stretches."""
    if num_rows <= most:
        return list(range(num_rows))
    edges = [num_rows * n // most for n in range(most + 1)]
    return [rng.randrange(lo, hi) for lo, hi in pairwise(edges)]


def _most_rows(sample: Sample) -> int:
    scores_of_a_row = sample.q.shape[1] * sample.k.shape[0]
    return min(MOST_ROWS, max(LEAST_ROWS, _MAX_SCORES[sample.q.device.type] // scores_of_a_row))


def _why_not_judged(sample: Sample) -> str | None:
    """Inputs of which nothing can be said: a right kernel may give anything for them."""
    largest = [float(it.abs().amax().to(torch.float64)) if it.numel() else 0.0 for it in (sample.q, sample.k, sample.v)]
    if not all(value < float("inf") for value in largest):  # NaN is below nothing
        return "q, k or v holds numbers that are not finite"
    if largest[0] * largest[1] * sample.q.shape[2] >= _FP32_MAX:
        return "products of q and k may exceed the range of fp32"
    return None


def _judgement(sample: Sample, rows: list[int], errors: Errors) -> Judgement:
    row, head, column = errors.worst_at
    query_head = sample.kv_head * sample.q.shape[1] + head
    position = sample.k.shape[0] - sample.q.shape[0] + rows[row]
    bias = abs(errors.bias) / errors.bias_limit
    factor = _MOST_FACTOR if errors.num_nonfinite else min(max(errors.worst, bias), _MOST_FACTOR)
    if not factor <= 1:  # NaN is not
        where = f"{sample.path} {sample.phase.value}, layer {sample.layer}, head {query_head}, position {position}"
        detail = f"{where}, column {column}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
        if bias > 1:
            detail += f"; the output is {1 + errors.bias:.6g} of the truth, at most {errors.bias_limit:.3g} may differ"
        if errors.num_nonfinite:
            detail += f"; {errors.num_nonfinite} numbers are not finite"
        return Judgement(factor, len(rows), query_head, position, detail)
    return Judgement(factor, len(rows), query_head, position)
