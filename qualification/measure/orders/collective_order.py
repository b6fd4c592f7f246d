"""The check of a path of sums over ranks that claims an order: a row's bits alone, beside others and at every place."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.collective.peers import AddNorm
from kernels.collective.shape import CollectiveShape, Follows
from kernels.system.device import torch_dtype
from qualification.evidence.evidence import Invariance
from qualification.measure.checks.collective_checks import RunOnRanks, copied
from qualification.measure.inputs.collective_inputs import CollectiveCase, collective_case
from qualification.measure.orders.first_bits import FirstBits
from qualification.measure.orders.row_batches import POOL_ROWS, RowBatch, hostile_rows, order_counts, row_batches

_SEED = 107
_BATCH = "order batch "  # and its number: the start of the names of these cases
_LARGE = 2.0**14  # times what others add, of a part that the next rank takes away: what was added before is then lost


def check_collective_order(
    run: RunOnRanks, shape: CollectiveShape, device: torch.device, *, seed: int, order: str, ends_early: bool = False
) -> Invariance:
    """Return what was seen of a path, on every rank. Errors of a call are not caught."""
    bits, names = FirstBits(ends_early=ends_early), ["sums"]
    for index, batch in enumerate(_batches(shape, device)):
        if bits.is_ended:
            break
        case = _case(shape, batch, f"{_BATCH}{index}", device, seed=seed)
        part, follows, judged = case.parts[0].clone(), copied(case.follows), batch.judged
        out = torch.empty_like(part)
        run(case, part, follows, out)
        found = {"sums": run.everywhere(out)}
        if follows is not None:
            found["residual"] = follows.residual[None]
            names = ["residual", "sums"]
        for name, of_ranks in found.items():
            for rank, of_rank in enumerate(of_ranks):
                where = f"{batch.name}, rank {rank}"
                bits.meet(name, POOL_ROWS, batch.source[judged], of_rank[judged], where)
    return bits.result(order, {name: torch.arange(POOL_ROWS, device=device) for name in names})


def any_case(shape: CollectiveShape, name: str, device: torch.device, *, seed: int) -> CollectiveCase:
    """Return the input of that name, of the checks of numbers or of an order: the same on every rank of a machine."""
    if not name.startswith(_BATCH):
        return collective_case(shape, name, device, seed=seed)
    index = int(name.removeprefix(_BATCH))
    batch = next(batch for number, batch in enumerate(_batches(shape, device)) if number == index)
    return _case(shape, batch, name, device, seed=seed)


def _batches(shape: CollectiveShape, device: torch.device) -> Iterator[RowBatch]:
    flops = shape.world * shape.columns
    counts = order_counts(shape.rows.lo, shape.rows.hi, flops, is_cpu=device.type == "cpu")
    return row_batches(counts, device)


def _case(shape: CollectiveShape, batch: RowBatch, name: str, device: torch.device, *, seed: int) -> CollectiveCase:
    random = torch.Generator(device).manual_seed(seed + _SEED)
    dtype = torch_dtype(shape.dtype)

    def rows(factor: float = 1.0) -> Tensor:
        return factor * torch.randn(POOL_ROWS, shape.columns, generator=random, device=device)

    parts = torch.stack([rows(1 / _LARGE) for _ in range(shape.world)])
    if shape.world > 2:  # of two numbers the order is in no bit
        parts[1] = rows(_LARGE)
        parts[2] = -parts[1]
    hostile = hostile_rows(shape.columns, dtype, random)
    whole = torch.cat([parts.to(dtype), hostile.expand(shape.world, -1, -1)], dim=1)[:, batch.source].contiguous()
    follows = None
    if shape.follows is Follows.ADD_NORM:
        weight = 1 + 0.1 * torch.randn(shape.columns, generator=random, device=device)
        residual = torch.cat([rows().to(dtype), hostile])[batch.source].contiguous()
        follows = AddNorm(residual, weight.to(dtype), 1e-5)
    return CollectiveCase(name, seed, shape, whole, follows)
