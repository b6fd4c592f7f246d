"""Where the patches of images stand: their order, their windows, their rotations, their learned positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.model.tower import Interpolation, TowerConfig

Grid = tuple[int, int]  # patches: height, width


@dataclass(frozen=True, slots=True)
class Geometry:
    """The order in which a tower computes the patches of several images, one image after another.

    The patches of one token stand together, row by row. Tokens stand row by row, or where there are windows window by
    window, row by row in each.

    A tower with class tokens computes one before the patches of each window.

    order    [patches] int64: the place of each computed patch among all patches, counted row by row of each image;
             class tokens are counted behind all of these
    tokens   [tokens] int64: where the token of each place of the prompt is among the computed ones
    rows, columns  [patches] int64: of each computed patch in its image; 0 of a class token
    images   lengths of the images in patches; windows: those of the windows, the same as `images` without windows
    classes  [windows] int64: which of the computed are class tokens, empty without such; patches: the others
    """

    order: Tensor
    tokens: Tensor
    rows: Tensor
    columns: Tensor
    images: tuple[int, ...]
    windows: tuple[int, ...]
    classes: Tensor
    patches: Tensor

    @classmethod
    def of(cls, config: TowerConfig, grids: Sequence[Grid]) -> "Geometry":
        """Return that of images of so many patches, on the CPU."""
        orders, tokens, rows, columns = [], [], [], []
        windows: list[int] = []
        num_patches = num_tokens = 0
        for height, width in grids:
            of_tokens, lengths = _token_order(height // config.merge, width // config.merge, config.window)
            row, column = _patches_of(of_tokens, width // config.merge, config.merge)
            orders.append(num_patches + row * width + column)
            tokens.append(num_tokens + of_tokens.argsort())
            rows.append(row)
            columns.append(column)
            windows += [length * config.merge**2 for length in lengths]
            num_patches += height * width
            num_tokens += of_tokens.numel()
        images = [height * width for height, width in grids]
        order, row, column = torch.cat(orders), torch.cat(rows), torch.cat(columns)
        is_class = torch.zeros(len(order), dtype=torch.bool)
        if config.has_class_token:
            behind = torch.arange(num_patches, num_patches + len(windows))
            before = torch.tensor([0, *windows[:-1]]).cumsum(0)
            order, row, column, is_class = (
                _with_classes(whole, before, own)
                for whole, own in ((order, behind), (row, behind * 0), (column, behind * 0), (is_class, behind > 0))
            )
            windows = [length + 1 for length in windows]
            images = [length + config.num_windows(length) for length in images]
        classes, patches = is_class.nonzero().flatten(), (~is_class).nonzero().flatten()
        return cls(order, torch.cat(tokens), row, column, tuple(images), tuple(windows), classes, patches)


def _with_classes(whole: Tensor, before: Tensor, own: Tensor) -> Tensor:
    """Return numbers of patches with one of a class token before each of these places."""
    pieces = torch.tensor_split(whole, before[1:])
    return torch.cat([part for one, piece in zip(own[:, None], pieces, strict=True) for part in (one, piece)])


def _token_order(height: int, width: int, window: int | None) -> tuple[Tensor, list[int]]:
    """Return an image's tokens in the order in which they are computed, and how many are in each window."""
    places = torch.arange(height * width).view(height, width)
    if window is None:
        return places.flatten(), [height * width]
    bands = torch.split(places, window, dim=0)
    blocks = [block for band in bands for block in torch.split(band, window, dim=1)]
    return torch.cat([block.flatten() for block in blocks]), [block.numel() for block in blocks]


def _patches_of(tokens: Tensor, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch of these tokens of an image `width` tokens wide."""
    within = torch.arange(merge)
    rows = (tokens // width * merge)[:, None, None] + within[:, None]
    columns = (tokens % width * merge)[:, None, None] + within
    shape = (tokens.numel(), merge, merge)
    return rows.expand(shape).flatten(), columns.expand(shape).flatten()


def rotation(config: TowerConfig, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines [patches, head_dim / 2] fp32: half of the angles by the row, half by the column.

    None where nothing is rotated.
    """
    if config.rope_theta is None:
        return None
    size = config.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=rows.device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    of_rows, of_columns = frequencies[0::2], frequencies[1::2] if config.alternates_rates else frequencies[0::2]
    both = ((columns, of_columns), (rows, of_rows)) if config.splits_heads else ((rows, of_rows), (columns, of_columns))
    parts = [torch.outer(places.float(), rates) for places, rates in both]
    angles = torch.cat(parts, dim=1)
    return angles.cos(), angles.sin()


def learned_positions(
    table: Tensor, side: int, grids: Sequence[Grid], interpolation: Interpolation = Interpolation.CORNERS
) -> Tensor:
    """Return the learned position of each patch, row by row of each image, [patches, hidden] fp32.

    table   [side ** 2, hidden], whose corners are those of each image, or whose points are the middles of squares that
            cover it, as patches are
    """
    square = table.float().view(side, side, -1)
    found = []
    for grid in grids:
        if interpolation is Interpolation.CORNERS:
            of_image = _interpolated(square, side, grid)
        else:
            of_image = _convolved(square, side, grid, is_cubic=interpolation is Interpolation.CUBIC)
        found.append(of_image.flatten(0, 1))
    return torch.cat(found)


def tiled_positions(table: Tensor, side: int, grids: Sequence[Grid]) -> Tensor:
    """Return the learned position of each patch of tiles, row by row, then those of their class tokens.

    table   [1 + side ** 2, hidden]: of a class token, then of a tile's patches
    """
    num_tiles = sum(height // side for height, _ in grids)
    return torch.cat((table[1:].repeat(num_tiles, 1), table[:1].expand(num_tiles, -1)))


def placed(tables: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Return the learned position of each patch, row by row of each image, [patches, hidden] of the tables' dtype.

    tables  [2, places, hidden]: a patch has that of its column, and that of its row, added
    """
    of_columns, of_rows = tables
    return torch.cat([(of_rows[:height, None] + of_columns[None, :width]).flatten(0, 1) for height, width in grids])


def _convolved(square: Tensor, side: int, grid: Grid, *, is_cubic: bool) -> Tensor:
    """Interpolate between middles of squares, linearly or by cubic convolution of the slope -3/4.

    Source: Keys 1981; `interpolate` and `grid_sample` of PyTorch, with align_corners false.
    """
    found = square
    for dim, count in enumerate(grid):
        places = (torch.arange(count, device=square.device) + 0.5) * (side / count) - 0.5
        low = places.floor()
        share, first = places - low, low.long()
        weights = {0: 1 - share, 1: share}
        if is_cubic:
            weights = {-1: _outer(share + 1), 0: _inner(share), 1: _inner(1 - share), 2: _outer(2 - share)}
        parts = [
            found.index_select(dim, (first + step).clamp(0, side - 1)) * weight.view(-1, *[1] * (2 - dim))
            for step, weight in weights.items()
        ]
        found = sum(parts[1:], parts[0])
    return found


def _inner(distance: Tensor) -> Tensor:
    """Return the weight of a point that is nearer than 1."""
    return (1.25 * distance - 2.25) * distance * distance + 1


def _outer(distance: Tensor) -> Tensor:
    """Return the weight of a point at a distance from 1 to 2."""
    return ((-0.75 * distance + 3.75) * distance - 6) * distance + 3


def _interpolated(square: Tensor, side: int, grid: Grid) -> Tensor:
    found = square
    for dim, count in enumerate(grid):
        places = torch.linspace(0, side - 1, count, device=square.device)
        low = places.long().clamp(max=side - 1)
        share = (places - low).view(-1, *[1] * (2 - dim))
        high = (low + 1).clamp(max=side - 1)
        found = found.index_select(dim, low) * (1 - share) + found.index_select(dim, high) * share
    return found
