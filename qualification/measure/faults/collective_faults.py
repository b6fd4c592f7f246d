"""Wrong sums over ranks that must be refused: all ranks in one process, each sum with one fault of a real exchange."""

from enum import Enum

import torch
from torch import Tensor

from kernels.collective.peers import AddNorm
from kernels.collective.shape import CollectiveShape, Follows
from kernels.fused.norm import add_rms_norm_torch
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.collective_checks import copied
from qualification.measure.inputs.collective_inputs import CollectiveCase

_UNIT = 8  # numbers of one access of 16 bytes


class CollectiveFault(Enum):
    """A fault of a wrong exchange; the comment says how a real one comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    PART_LEFT_OUT = "a rank's part is left out"  # the last one's: a loop over the ranks ends early
    PART_TWICE = "a rank's part is added twice"  # its own, from its registers and from its inbox
    STALE_PART = "a part is of the call before"  # read before it arrived: a buffer that was not cleared
    RANKS_DIFFER = "ranks add up in different orders"  # each begins with its own part
    TAIL_LEFT_OUT = "the last unit of a row is not summed"  # a mask by whole tiles
    ROUNDED_BETWEEN = "the sum is rounded between ranks"  # a ring that passes 16 bits on
    RESIDUAL_LEFT_OUT = "the residual is not added"
    UNSTABLE = "the order of sums differs from run to run"  # parts are added as they arrive
    STALE_OUTPUT = "the last row is not written"  # grid too small
    STRAY_WRITE = "one row past the output is written"  # store without a mask


def trial_shapes(dtype: Dtype) -> tuple[CollectiveShape, ...]:
    """Sums on which every fault can show, as small as that allows."""
    rows = TokenRows.LE_16
    return (
        CollectiveShape(dtype, 72, 4, Follows.NOTHING, rows),
        CollectiveShape(dtype, 72, 4, Follows.ADD_NORM, rows),
    )


def can_show_in(fault: CollectiveFault, shape: CollectiveShape) -> bool:
    """True when an exchange with this fault computes the shape wrongly, and so much that its dtype shows it."""
    has_norm, is_half = shape.follows is Follows.ADD_NORM, shape.dtype is not Dtype.FP32
    needs = {
        CollectiveFault.ROUNDED_BETWEEN: is_half and shape.world > 2,
        CollectiveFault.RESIDUAL_LEFT_OUT: has_norm,
    }
    return needs.get(fault, True)


class WrongRanks:
    """Ranks with this fault, as `RunOnRanks`."""

    def __init__(self, fault: CollectiveFault) -> None:
        self._fault = fault
        self._last: CollectiveCase | None = None  # of the call before
        self._calls = 0

    def __call__(self, case: CollectiveCase, _part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
        order = list(range(case.shape.world))
        if self._fault is CollectiveFault.UNSTABLE and self._calls % 2:
            order.reverse()
        found = self._result(case.parts.clone(), order, follows)
        num_rows = len(out) - (self._fault is CollectiveFault.STALE_OUTPUT)
        out[:num_rows] = found[:num_rows]
        if self._fault is CollectiveFault.STRAY_WRITE:
            out.as_strided((out.stride(0),), (1,), out.storage_offset() + out.numel()).zero_()
        self._last = case
        self._calls += 1

    def everywhere(self, own: Tensor) -> Tensor:
        case = self._last
        assert case is not None, "a call was made"
        if self._fault is not CollectiveFault.RANKS_DIFFER:
            return own[None].expand(case.shape.world, *own.shape)
        ranks = range(case.shape.world)
        orders = [[first, *(rank for rank in ranks if rank != first)] for first in ranks]
        return torch.stack([self._result(case.parts.clone(), order, copied(case.follows)) for order in orders])

    def _result(self, parts: Tensor, order: list[int], follows: AddNorm | None) -> Tensor:
        fault, between = self._fault, torch.float32
        if fault is CollectiveFault.PART_LEFT_OUT:
            order = order[:-1]
        if fault is CollectiveFault.PART_TWICE:
            order = [order[0], *order]
        if fault is CollectiveFault.STALE_PART and self._last is not None:
            before = self._last.parts[-1, : parts.shape[1]]
            parts[-1, : len(before)] = before
        if fault is CollectiveFault.TAIL_LEFT_OUT:
            parts[1:, :, -_UNIT:] = 0
        if fault is CollectiveFault.ROUNDED_BETWEEN:
            between = parts.dtype
        total = parts[order[0]].float()
        for rank in order[1:]:
            total = (total + parts[rank].float()).to(between).float()
        rounded = total.to(parts.dtype)
        if follows is None:
            return rounded
        if fault is CollectiveFault.RESIDUAL_LEFT_OUT:
            follows.residual.zero_()
        return add_rms_norm_torch(rounded, follows.residual, follows.weight, follows.eps)[0]
