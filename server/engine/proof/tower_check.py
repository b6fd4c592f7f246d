"""The check of the tower: each section of it is held to the plain forward pass, as those of the layers are."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.model.forward.bounded import Bounded
from qualification.model.forward.tower import PixelNumbers, TowerReference
from qualification.model.tower import Merging
from server.engine.proof.layer_check import MOST_FACTOR, Difference, difference
from server.model.vision.geometry import Geometry, Grid
from server.model.vision.tower import Image, Pixels, Tower, TowerBorder

_ROW = "an image"
_OF_TOKENS = (
    TowerBorder.MERGER_READ,
    TowerBorder.MERGED,
    TowerBorder.MERGER_GATES_READ,
    TowerBorder.MERGER_FED,
)
_SIDES = (5, 7)  # tokens: of Qwen 2.5's windows of four, one is whole and three are cut off


@dataclass(frozen=True, slots=True)
class TowerChecked:
    """The largest difference of each section, in the order of the computation, and how many numbers were compared."""

    differences: tuple[Difference, ...]
    num_numbers: int


def checked_grid(tower: Tower) -> Grid:
    """Return the patches of the image that is checked."""
    config = tower.config
    height, width = (side * config.merge for side in _SIDES)
    if config.image_side is None:
        return height, width
    if config.is_tiled:
        return 2 * config.image_side, config.image_side
    # Of a model whose images have one size: no larger, and not square, so that rows are not taken for columns.
    most = max(config.merge, config.image_side - config.merge)
    return min(height, most), min(width, config.image_side)


class TowerCheck:
    """Runs an image through a served tower, and compares."""

    def __init__(self, tower: Tower, reference: TowerReference, pixels: Pixels) -> None:
        self._tower = tower
        self._reference = reference
        self._pixels = PixelNumbers(pixels.mean, pixels.deviation, pixels.factor)

    @torch.inference_mode()
    def run(self) -> TowerChecked:
        """Compute the image, and compare. Raises CheckpointError."""
        tower, grid = self._tower, checked_grid(self._tower)
        side, generator = tower.config.patch_size, torch.Generator().manual_seed(0)
        shape = (grid[0] * side, grid[1] * side, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        seen: dict[tuple[TowerBorder, int | None], Tensor] = {}
        # Kept on the host: of two tiles of InternViT-6B they are 8 GB.
        tower.observe = lambda border, index, value: seen.update({(border, index): value.to("cpu", copy=True)})
        try:
            result = tower.encode([Image(pixels, grid)])
        finally:
            tower.observe = None
        found = list(self._sections(_Seen(seen, Geometry.of(tower.config, [grid]), result), pixels))
        return TowerChecked(tuple([it for it, _ in found]), sum(size for _, size in found))

    def _sections(self, seen: "_Seen", pixels: Tensor) -> Iterator[tuple[Difference, int]]:
        reference, config = self._reference, self._reference.config

        def section(border: TowerBorder, index: int | None, expected: Bounded) -> tuple[Difference, int]:
            served = seen.at(border, index)
            return difference(f"tower, {border.value}", index, _ROW, served, expected), served.numel()

        def merged(x: Bounded, place: int | None) -> Iterator[tuple[Difference, int]]:
            yield section(TowerBorder.MERGER_READ, place, reference.merger_read(x, place))
            read, fed = (seen.exact(it, place) for it in (TowerBorder.MERGER_READ, TowerBorder.MERGER_FED))
            if config.merging in (Merging.PRODUCT, Merging.GATED):
                yield section(TowerBorder.MERGED, place, reference.merging(read, place))
                read = seen.exact(TowerBorder.MERGED, place)
            if config.merging is Merging.GATED:
                yield section(TowerBorder.MERGER_GATES_READ, place, reference.merger_gates_read(read))
                read = seen.exact(TowerBorder.MERGER_GATES_READ, place)
            yield section(TowerBorder.MERGER_FED, place, reference.merger_fed(read, place))
            served = seen.rows_of(place, config.out_size)
            yield difference("tower, rows", place, _ROW, served, reference.merged(fed, place)), served.numel()

        yield section(TowerBorder.PATCHED, None, reference.patched(pixels, self._pixels))
        x = seen.exact(TowerBorder.PATCHED, None)
        if config.norms_patches:
            yield section(TowerBorder.PATCHES_NORMED, None, reference.patches_normed(x))
            x = seen.exact(TowerBorder.PATCHES_NORMED, None)
        for index in range(config.num_layers):
            yield section(TowerBorder.ATTENTION_READ, index, reference.attention_read(index, x))
            q, k, v = reference.heads(index, seen.exact(TowerBorder.ATTENTION_READ, index))
            yield self._of_sequences(index, seen), 0
            yield section(TowerBorder.QUERIES, index, q)
            yield section(TowerBorder.KEYS, index, k)
            yield section(TowerBorder.VALUES, index, v)
            heads = [seen.at(it, index) for it in (TowerBorder.QUERIES, TowerBorder.KEYS, TowerBorder.VALUES)]
            yield section(TowerBorder.ATTENDED, index, reference.attended(index, *heads))
            behind = reference.after_attention(index, x, seen.exact(TowerBorder.ATTENDED, index))
            yield section(TowerBorder.BEHIND_ATTENTION, index, behind)
            x = seen.exact(TowerBorder.BEHIND_ATTENTION, index)
            yield section(TowerBorder.FEED_FORWARD_READ, index, reference.feed_forward_read(index, x))
            yield section(
                TowerBorder.FED, index, reference.fed(index, seen.exact(TowerBorder.FEED_FORWARD_READ, index))
            )
            behind = reference.after_feed_forward(index, x, seen.exact(TowerBorder.FED, index))
            yield section(TowerBorder.BEHIND_FEED_FORWARD, index, behind)
            x = seen.exact(TowerBorder.BEHIND_FEED_FORWARD, index)
            if index in config.deepstack:
                yield from merged(x, config.deepstack.index(index))
        if config.norms_last:
            yield section(TowerBorder.LAST_NORMED, None, reference.last_normed(x))
            x = seen.exact(TowerBorder.LAST_NORMED, None)
        yield from merged(x, None)

    def _of_sequences(self, index: int, seen: "_Seen") -> Difference:
        """Return whether paths were told other sequences of patches than the image's: no path is to blame for those."""
        own, given = self._reference.sequences(index).cpu(), seen.sequences(index)
        counts = [torch.unique(it, dim=0).shape[0] for it in (own, given, torch.stack((own, given), dim=1))]
        name = f"tower, {TowerBorder.SEQUENCES.value}"
        if len(set(counts)) == 1:
            return Difference(name, index, _ROW, 0.0, 0.0, 0.0)
        detail = f"a path is told {counts[1]} windows, and the image has {counts[0]}"
        if counts[0] == counts[1]:
            detail = f"a path is told {counts[1]} windows of other patches than the image's"
        return Difference(name, index, _ROW, MOST_FACTOR, 0.0, 0.0, detail)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Tensors that a tower has handed out, in the order of the pixels; its rows are in that of the prompt.

    found    on the CPU, in the order of the computation; result: on the tower's device
    """

    found: dict[tuple[TowerBorder, int | None], Tensor]
    geometry: Geometry
    result: Tensor

    def at(self, border: TowerBorder, index: int | None) -> Tensor:
        value, geometry = self.found[border, index], self.geometry
        if border in _OF_TOKENS:
            found = value.index_select(0, geometry.tokens)
        else:
            found = torch.empty_like(value).index_copy_(0, geometry.order, value)
        return found.to(self.result.device)

    def sequences(self, index: int) -> Tensor:
        """Return [patches] the number of the sequence that paths were told for each."""
        ends = self.found[TowerBorder.SEQUENCES, index].cpu()
        numbers = torch.bucketize(torch.arange(self.geometry.order.numel()), ends[1:], right=True)
        return torch.empty_like(numbers).index_copy_(0, self.geometry.order, numbers)

    def exact(self, border: TowerBorder, index: int | None) -> Bounded:
        return Bounded.exact(self.at(border, index))

    def rows_of(self, place: int | None, size: int) -> Tensor:
        """Return the part of the rows that a merger makes."""
        first = 0 if place is None else (place + 1) * size
        return self.result[:, first : first + size]
