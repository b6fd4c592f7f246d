"""Exchange between tensor-parallel ranks within a forward pass: sums of parts, parts of the logits, chosen tokens.

Between GPUs few rows travel by writes into each other's memory (`kernels/collective/`), many of two ranks by copies
there, many of more by NCCL. All go on the current stream, or join it, wait for nothing on the host and allocate only
results, so that a CUDA graph can hold them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.calls import launch
from kernels.collective.boxes import MOST_ROWS, Boxes, BoxPeers, make_boxes, pieces
from kernels.collective.inboxes import PeerMemoryError, RankInboxes, num_connected
from kernels.collective.library_path import run_library
from kernels.collective.peers import AddNorm, Peers, RunCollective
from kernels.linear.rounded_input import Input
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class EarlyRows:
    """Rows of a sum that are sent to the other rank while later ones are still multiplied.

    is_exchanged  whether the sums of so many rows go by these boxes now
    """

    boxes: Boxes
    is_exchanged: Callable[[int], bool]

    def pieces(self, num_rows: int) -> tuple[int, ...]:
        """Return the rows of each launch of a product of so many rows, whose result is summed over the ranks."""
        return pieces(num_rows) if num_rows <= MOST_ROWS and self.is_exchanged(num_rows) else (num_rows,)

    def start(self, rows: Tensor) -> None:
        """Send the next piece of a result [rows, columns]. The sum that follows must be that of all its pieces."""
        self.boxes.start(rows)


@dataclass(frozen=True, slots=True)
class Ranks:
    """`world` processes of torch.distributed's default group, each with the same shapes. `index` is this one's.

    Every method is called by all ranks, in the same order, and raises torch's RuntimeError where one of them is gone.
    After each one all ranks have the same bits.

    inboxes  None on a CPU, and where GPUs cannot address each other's memory
    run      what computes the sums
    boxes    of two ranks with inboxes
    """

    index: int = 0
    world: int = 1
    inboxes: RankInboxes | None = None
    run: RunCollective = run_library
    boxes: Boxes | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world:
            raise ValueError(f"rank {self.index} is outside of [0, {self.world})")

    @property
    def peers(self) -> Peers:
        sums = None if self.inboxes is None else self.inboxes.sums
        return BoxPeers(self.index, self.world, sums, self.boxes)

    def connected(
        self, hidden_size: int, dtype: torch.dtype, head_sizes: Sequence[int], device: torch.device
    ) -> "Ranks":
        """Return ranks that write into each other's memory, where they are GPUs that can.

        hidden_size, dtype   of the rows that are summed
        head_sizes           columns of the logits that each rank computes
        Raises PeerMemoryError on all ranks where CUDA lets their processes share none.
        """
        if self.world == 1 or device.type != "cuda" or launch.triton_version() is None:
            return self
        from kernels.collective.push_path import Row, connect

        row = Row(hidden_size, dtype)
        if not row.is_taken or num_connected() < self.world:
            return self
        inboxes = connect(self.index, self.world, row, head_sizes, device)
        boxes = None if self.world > 2 else self._boxes(row.columns * dtype.itemsize, device, inboxes)
        return replace(self, inboxes=inboxes, boxes=boxes, run=_run_by_rows)

    def _boxes(self, row_bytes: int, device: torch.device, inboxes: RankInboxes) -> Boxes:
        try:
            return make_boxes(self.index, row_bytes, device)
        except PeerMemoryError:
            columns = None if inboxes.columns is None else inboxes.columns.inboxes
            for made in (inboxes.sums, inboxes.values, columns):
                if made is not None:
                    made.memory.release(self.world)
            raise

    def sum(self, part: Tensor) -> Tensor:
        """Add the ranks' parts [T, H], in place, in the order of the ranks and in fp32, rounded once."""
        self.run(self.peers, part, None, part)
        return part

    def sum_beside(self, part: Tensor) -> Tensor:
        """Add as `sum` does, by torch.distributed, what is no row of the model: [T, any size], in place."""
        run_library(self.peers, part, None, part)
        return part

    def add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual += the sum of the ranks' parts, then RMSNorm: what `add_rms_norm` does with that sum.

        part, residual [T, H], contiguous, both written in place. Returns (normed, residual); normed lies in `part`.
        """
        self.run(self.peers, part, AddNorm(residual, weight, eps), part)
        return part, residual

    def summed(self, product: Product) -> Product:
        """`product`, of whose result each rank computes a part of the sum."""
        return Summed(self, product)

    def joined(self, part: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """[R, sum of sizes] from each rank's columns [R, its size], in `out` where it is given."""
        num_rows = part.shape[0]
        if out is None:
            out = part.new_empty(num_rows, sum(sizes))
        if not self._pushes_columns(part, sizes, out):
            return self._gathered_columns(part, sizes, out)
        from kernels.collective.push_path import push_columns

        assert self.inboxes is not None
        assert self.inboxes.columns is not None
        push_columns(self.inboxes.columns, part, out)
        return out

    def share(self, values: Tensor) -> Tensor:
        """Give rank 0's values to all ranks, in place."""
        if self.inboxes is None or values.dtype not in (torch.int32, torch.int64):
            dist.broadcast(values, src=0)
            return values
        from kernels.collective.push_path import MOST_VALUES, push_values

        if values.numel() > MOST_VALUES or not values.is_contiguous():
            dist.broadcast(values, src=0)
        else:
            push_values(self.inboxes.values, values)
        return values

    def _pushes_columns(self, part: Tensor, sizes: Sequence[int], out: Tensor) -> bool:
        columns = None if self.inboxes is None else self.inboxes.columns
        if columns is None or part.dtype != columns.dtype or tuple(sizes) != columns.sizes:
            return False
        return part.shape[0] <= columns.most_rows and part.is_contiguous() and out.is_contiguous()

    def _gathered_columns(self, part: Tensor, sizes: Sequence[int], out: Tensor) -> Tensor:
        """Gather by torch.distributed. All parts travel as wide as the widest."""
        num_rows, widest = part.shape[0], max(sizes)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = part.new_empty(self.world * num_rows, widest)
        dist.all_gather_into_tensor(parts, padded.contiguous())
        parts = parts.view(self.world, num_rows, widest)
        if min(sizes) == widest:
            out.view(num_rows, self.world, widest).copy_(parts.transpose(0, 1))
            return out
        for found, columns in zip(parts, out.split_with_sizes(list(sizes), dim=1), strict=True):
            columns.copy_(found[:, : columns.shape[1]])
        return out

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers, which the host waits for."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)


def _run_by_rows(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Sum as many rows as the inboxes have places for through them, more of two ranks by copies, of others by NCCL."""
    from kernels.collective.exchange_path import run_exchange
    from kernels.collective.push_path import run_push

    is_few = peers.inboxes is not None and part.shape[0] <= peers.inboxes.capacity
    has_boxes = isinstance(peers, BoxPeers) and peers.boxes is not None
    (run_push if is_few else run_exchange if has_boxes else run_library)(peers, part, follows, out)


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class Summed:
    """A product of whose result each rank computes a part of the sum."""

    ranks: Ranks
    product: Product

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
        return self.ranks.sum(self.product(x, step, out))
