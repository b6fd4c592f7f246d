"""The truth of an indexer's choice, and what a right kernel may choose otherwise.

Scores are sums of products, which a right kernel adds up in fp32 in any order: keys whose scores differ by less than
what two such sums may err can change places. Keys with scores that are equal to the bit have one order, and inputs
whose sums fp32 holds exactly have one choice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch
from kernels.calls.indexed import Index
from kernels.calls.rows import keys_of, sequences_of

_U32 = 2.0**-24
_CHUNK_NUMBERS = 2**22  # of the products of one chunk of query rows


@dataclass(frozen=True, slots=True)
class ChoiceError:
    """A choice that no right kernel makes. row: of those compared."""

    row: int
    detail: str


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scores [T, n] fp64, the most that a sum of them in fp32 may err) of keys [n, dim].

    A sum of n terms in any order errs by at most n u of the sum of their sizes; tensor cores cut off where they should
    round, which is twice that. Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2.
    """
    own, of_keys, factors = queries.double(), keys.double(), weights.double()
    products = torch.einsum("thd,nd->thn", own, of_keys)
    sizes = torch.einsum("thd,nd->thn", own.abs(), of_keys.abs())
    scores = torch.einsum("thn,th->tn", products.clamp(min=0), factors)
    most = torch.einsum("thn,th->tn", sizes, factors.abs())
    return scores, 2 * (keys.shape[1] + queries.shape[1] + 4) * _U32 * most


def choice_oracle(index: Index, index_keys: Tensor, batch: AttentionBatch) -> Tensor:
    """Return the choice [T, count] of scores in fp64; positions ascend, -1 behind the last.

    index_keys  [tokens, 1, dim] packed, or pages [num_pages, page_size, 1, dim]
    """
    assert index.queries is not None, "an earlier layer's choice is given"
    assert index.weights is not None, "an earlier layer's choice is given"
    found = torch.full_like(index.chosen, -1)
    for sequence in sequences_of(batch):
        keys = keys_of(index_keys, batch, sequence)[:, 0]
        size = max(1, _CHUNK_NUMBERS // max(1, index.queries.shape[1] * sequence.num_keys))
        for start in range(sequence.start, sequence.end, size):
            rows = slice(start, min(start + size, sequence.end))
            scores, _ = index_scores(index.queries[rows], index.weights[rows], keys)
            positions = torch.arange(rows.start, rows.stop, device=keys.device) - sequence.end + sequence.num_keys
            found[rows] = _highest(scores, positions, index.count)
    return found


def chosen_mask(chosen: Tensor, num_keys: int) -> Tensor:
    """Return which of a sequence's keys are chosen, bool [T, num_keys], of positions [T, count]."""
    mask = torch.zeros(chosen.shape[0], num_keys + 1, dtype=torch.bool, device=chosen.device)
    mask.scatter_(1, chosen.long().masked_fill(chosen < 0, num_keys), True)
    return mask[:, :num_keys]


def why_wrong_choice(index: Index, keys: Tensor, positions: Tensor) -> ChoiceError | None:
    """Return what of a choice no right kernel chooses: None where all of it may be.

    index      with what made the choice; rows of one sequence
    keys       [n, dim], the indexer's, of the sequence from its first token on
    positions  [T] int64, of the rows in the sequence
    """
    assert index.queries is not None, "an earlier layer's choice is given"
    assert index.weights is not None, "an earlier layer's choice is given"
    scores, most = index_scores(index.queries, index.weights, keys)
    places = torch.arange(keys.shape[0], device=keys.device)
    sees = places <= positions[:, None]
    chosen = index.chosen.long()
    due = (positions + 1).clamp(0, index.count)
    is_place = chosen >= 0
    ascends = (chosen[:, 1:] > chosen[:, :-1]) | ~is_place[:, 1:]
    is_set = ascends.all(dim=1) & (is_place.sum(dim=1) == due) & (chosen.amax(dim=1) <= positions)
    if not bool(is_set.all()):
        row = int((~is_set).nonzero()[0])
        return ChoiceError(row, f"not {int(due[row])} positions up to {int(positions[row])}, each once, ascending")
    mask = chosen_mask(index.chosen, keys.shape[0])
    lowest, at = (scores + most).masked_fill(~mask, torch.inf).min(dim=1)
    highest, left = (scores - most).masked_fill(mask | ~sees, -torch.inf).max(dim=1)
    if bool((is_wrong := lowest < highest).any()):
        row = int(is_wrong.nonzero()[0])
        key, other = int(at[row]), int(left[row])
        pair = f"key {key} of score {float(scores[row, key]):.6g}, not key {other} of {float(scores[row, other]):.6g}"
        return ChoiceError(row, f"position {int(positions[row])} chooses {pair}")
    return None


def _highest(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return [T, count] int32, of scores [T, n]: those above the count-th score, and the first ones of that score."""
    places = torch.arange(scores.shape[1], device=scores.device)
    seen = scores.masked_fill(places > positions[:, None], -torch.inf)
    due = (positions + 1).clamp(0, min(count, scores.shape[1]))
    in_order = seen.sort(dim=1, descending=True).values
    last = in_order.gather(1, (due - 1).clamp(min=0)[:, None])
    above, equal = seen > last, seen == last
    left = due[:, None] - above.sum(dim=1, keepdim=True)
    taken = (above | (equal & (equal.cumsum(dim=1) <= left))) & (due > 0)[:, None]
    found = torch.full((scores.shape[0], count), -1, dtype=torch.int32, device=scores.device)
    rows, keys = taken.nonzero(as_tuple=True)
    found[rows, (taken.cumsum(dim=1) - 1)[rows, keys]] = keys.int()
    return found
