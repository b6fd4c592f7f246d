"""Kernels that attend to other keys than those that an indexer chooses, and must be refused."""

from enum import Enum

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, IndexedFlags
from kernels.calls.rows import SequenceRows, keys_of, sequences_of
from kernels.reference.choice import chosen_mask
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from kernels.vocabulary.value_shape import Indexer, Values, indexer_of, with_values
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.faults.latent_faults import trial_shapes_of_latents
from qualification.measure.inputs.attention_inputs import cases

_COUNTS, _HEADS, _DIM = (24, 40), 6, 32


class IndexedFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # must pass
    ONE_SHORT = "a key less than asked for is chosen"  # `<` for `<=` at the border
    FUTURE = "a later key is chosen"  # the mask of the scores is a key too wide
    OTHER_WEIGHT = "a head has the weight of its neighbour"  # a row of the weights too far
    NOT_CUT = "negative products count"  # the relu is left out
    CUT_LATE = "the sum of the heads is cut off at 0, not each product"  # relu behind the sum
    LATER_FIRST = "of equal scores the later key is chosen"  # a sort of the other direction
    OTHER_KEYS = "the indexer reads the first numbers of a row"  # the offset of its key is left out
    PAST_CONTEXT = "positions of the choice are those of the tile"  # an offset that is not added
    ALL_KEYS = "all keys are attended to"  # the choice is not read
    ORDER_LOST = "the choice is not in the order of positions"  # by score, as the sort gives it


_CHOOSING = frozenset(IndexedFault) - {IndexedFault.NONE, IndexedFault.ALL_KEYS}


def wrong_indexed_kernel(fault: IndexedFault) -> RunAttention:
    """Attention to chosen keys with this fault. Not for service."""

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        del v  # the first numbers of k
        assert isinstance(flags, IndexedFlags), "the shape has an indexer"
        for sequence in sequences_of(batch):
            rows, keys = slice(sequence.start, sequence.end), keys_of(k, batch, sequence)[:, 0]
            index = flags.index.rows(rows)
            if index.queries is not None:
                own = keys[:, : index.queries.shape[2]] if fault is IndexedFault.OTHER_KEYS else keys[:, q.shape[2] :]
                index.chosen.copy_(_choice(index, own, sequence, fault))
            seen = chosen_mask(index.chosen, sequence.num_keys)
            positions = torch.arange(sequence.num_queries, device=q.device)[:, None] + sequence.position(sequence.start)
            if fault is IndexedFault.ALL_KEYS:
                seen = torch.arange(sequence.num_keys, device=q.device) <= positions
            scores = torch.einsum("rhd,nd->rhn", q[rows].double(), keys[:, : q.shape[2]].double()) * flags.scale
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=2).nan_to_num(0.0)
            found = torch.einsum("rhn,nd->rhd", weights, keys[:, : out.shape[2]].double())
            out[rows] = found.to(out.dtype)

    return run


def _choice(index: Index, keys: Tensor, sequence: SequenceRows, fault: IndexedFault) -> Tensor:
    """Return the choice [T, count] int32 of one sequence's queries; keys [n, dim]."""
    assert index.queries is not None, "an earlier layer's choice is given"
    assert index.weights is not None, "an earlier layer's choice is given"
    weights = index.weights.double()
    if fault is IndexedFault.OTHER_WEIGHT:
        weights = weights.roll(1, dims=1)
    products = torch.einsum("rhd,nd->rhn", index.queries.double(), keys.double())
    if fault not in (IndexedFault.NOT_CUT, IndexedFault.CUT_LATE):
        products = products.relu()
    scores = (products * weights[:, :, None]).sum(dim=1)
    if fault is IndexedFault.CUT_LATE:
        scores = scores.relu()
    num_keys, places = keys.shape[0], torch.arange(keys.shape[0], device=keys.device)
    positions = torch.arange(index.queries.shape[0], device=keys.device)[:, None] + sequence.position(sequence.start)
    last = positions + (fault is IndexedFault.FUTURE)
    scores = scores.masked_fill(places > last, -torch.inf)
    due = (last + 1).clamp(0, index.count - (fault is IndexedFault.ONE_SHORT)).clamp(max=num_keys)
    if fault is IndexedFault.LATER_FIRST:
        order = num_keys - 1 - scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    else:
        order = scores.sort(dim=1, descending=True, stable=True).indices
    order = order[:, : index.count]
    is_chosen = torch.arange(order.shape[1], device=keys.device) < due
    if fault is not IndexedFault.ORDER_LOST:
        order = order.masked_fill(~is_chosen, num_keys).sort(dim=1).values
    if fault is IndexedFault.PAST_CONTEXT:
        order = (order - 1).clamp(min=0)
    found = torch.full_like(index.chosen, -1)
    found[:, : order.shape[1]] = order.masked_fill(~is_chosen, -1).int()
    return found


def trial_shapes_of_indexers(dtype: Dtype) -> tuple[AttentionShape, ...]:
    """Two shapes of each phase, with an indexer and with an earlier layer's choice, as small as show every fault."""
    indexers = Indexer(_COUNTS[0], _HEADS, _DIM), Indexer(_COUNTS[1])
    return tuple(
        with_values(shape, Values(64, True, indexer))
        for shape in trial_shapes_of_latents(dtype)
        for indexer in indexers
    )


def can_show_in(fault: IndexedFault, shape: AttentionShape) -> bool:
    """Return whether a kernel with this fault computes the shape wrongly: one that is given the choice makes none."""
    if fault is IndexedFault.FUTURE and shape.phase is Phase.DECODE:
        return False  # no key is later than the query
    indexer = indexer_of(shape)
    return fault not in _CHOOSING or (indexer is not None and indexer.heads > 0)


def indexed_faults_passed_wrongly(
    dtypes: frozenset[Dtype], device: torch.device, *, seed: int = 0
) -> tuple[tuple[IndexedFault, AttentionShape], ...]:
    """Try the checker on every fault, and on none. Empty when it refuses all that is wrong and passes what is right."""
    found = []
    with one_thread():
        for dtype in (dtype for dtype in Dtype if dtype in dtypes):
            for shape in trial_shapes_of_indexers(dtype):
                inputs, references = list(cases(shape, device, seed=seed)), References()
                for fault in (it for it in IndexedFault if can_show_in(it, shape)):
                    run = wrong_indexed_kernel(fault)
                    passes = all(it.is_passed for case in inputs for it in check_path(run, [case], references))
                    if passes is not (fault is IndexedFault.NONE):
                        found.append((fault, shape))
    return tuple(found)
