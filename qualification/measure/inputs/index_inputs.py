"""Inputs of an indexer, beside those of attention: numbers whose sums fp32 holds exactly, so that one choice is right.

Queries and keys of an indexer are small integers, most of them 0, and weights are quarters: many keys have equal
scores, among them those at the border of the choice, and the order of a sum changes no bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch
from kernels.calls.indexed import Index
from kernels.reference.choice import choice_oracle
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import AttentionShape
from kernels.vocabulary.value_shape import Indexer
from qualification.measure.inputs.guard import guarded

_GIVEN_HEADS, _GIVEN_DIM = 4, 16  # of what makes the choice that a layer without an indexer of its own is given
_SHARE = 0.25  # of the numbers that are not 0
_NO_KEY = -(2**30)  # stands in a choice that is not written yet


def index_sizes(indexer: Indexer) -> tuple[int, int]:
    """Return the heads and the numbers of each that an input's choice is made by."""
    return (indexer.heads, indexer.dim) if indexer.heads else (_GIVEN_HEADS, _GIVEN_DIM)


def small_integers(rows: int, heads: int, dim: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """[rows, heads, dim] of -2 to 2 in the dtype of `like`, NaN before and behind it in its storage."""
    sizes = like.new_empty(0, heads, dim)
    _, found = guarded(rows, sizes, 0.0, torch.nan)
    numbers = torch.randint(-2, 3, found.shape, generator=generator, device=generator.device)
    is_kept = torch.rand(found.shape, generator=generator, device=generator.device) < _SHARE
    return found.copy_(numbers * is_kept)


def index_of(
    indexer: Indexer,
    shape: AttentionShape,
    num_queries: int,
    index_keys: Tensor,
    batch: AttentionBatch,
    generator: torch.Generator,
    *,
    is_tied: bool,
) -> Index:
    """Return what chooses the keys of an input, with the right choice.

    index_keys  packed or pages, as `choice_oracle` takes them
    is_tied     whether all weights are 0, so that all keys have the score 0
    """
    heads, dim = index_sizes(indexer)
    like = torch.empty(0, dtype=torch_dtype(shape.dtype), device=generator.device)
    queries = small_integers(num_queries, heads, dim, generator, like)
    numbers = torch.randint(-4, 5, (num_queries, heads), generator=generator, device=generator.device)
    weights = numbers.float().div_(4).mul_(0.0 if is_tied else 1.0)
    chosen = torch.empty(num_queries, indexer.num_keys, dtype=torch.int32, device=generator.device)
    found = Index(chosen, queries, weights)
    found = replace(found, chosen=choice_oracle(found, index_keys, batch))
    return found if indexer.heads else found.as_given()


def unwritten(index: Index) -> Index:
    """Return the same with a choice that is still to be written; a choice that is given stays."""
    return index if index.queries is None else replace(index, chosen=torch.full_like(index.chosen, _NO_KEY))
