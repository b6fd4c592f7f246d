"""The towers of models of Qwen, Mistral and Gemma, from their published definitions and the checkpoint's own tensors.

Everything here is in the order of the pixels: patches row by row, each at its row and column. What a served tower hands
out in another order is brought into this one first. Sources: Qwen2.5-VL and Qwen3-VL technical reports, Pixtral 12B
(Agrawal et al. 2024), SigLIP (Zhai et al. 2023) and the Gemma 3 technical report, and the classes of their checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.model.forward.attention import Attends, attend
from qualification.model.forward.bounded import (
    Bounded,
    Precision,
    U,
    chunks_of,
    function_of,
    layer_norm,
    product,
    rms_norm,
)
from qualification.model.forward.checkpoint import Checkpoint, CheckpointError
from qualification.model.forward.mixture import Gate, gate_named, gate_of
from qualification.model.forward.rotation import turn
from qualification.model.tower import Interpolation, Merging, TowerConfig

_OF_PIXELS = 8  # roundings in fp32 of a pixel's number, of the largest of its parts


@dataclass(frozen=True, slots=True)
class PixelNumbers:
    """A pixel is (value * factor - mean) / deviation, of red, green and blue."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    factor: float


class TowerReference:
    """A tower in sections, each of what a served one hands out before it, for one image of height x width patches."""

    def __init__(
        self, checkpoint: Checkpoint, config: TowerConfig, precision: Precision, grid: tuple[int, int]
    ) -> None:
        """Raises CheckpointError where the checkpoint has no tower."""
        self.config = config
        self._checkpoint = checkpoint
        self._precision = precision
        self._height, self._width = grid
        self._names = config.names
        ways = self._names.written(f"{self._names.patches}.weight")
        known = [way for way, it in enumerate(ways) if checkpoint.has(it)]
        if not known:
            raise CheckpointError(f"the checkpoint has no tensor {ways[0]}")
        self._way = known[0]  # in which all names are written
        places = torch.arange(self._height * self._width, device=checkpoint.device)
        self._rows, self._columns = places // self._width, places % self._width
        self._num_patches = len(places)
        if config.has_class_token and config.num_positions is not None:
            # Behind all patches a class token of each tile, which counts as its first row.
            first = torch.arange(0, self._height, config.num_positions, device=checkpoint.device)
            self._rows = torch.cat((self._rows, first))
            self._columns = torch.cat((self._columns, torch.zeros_like(first)))

    def patched(self, pixels: Tensor, numbers: PixelNumbers) -> Bounded:
        """Return what the first layer reads, of pixels [height, width, 3]."""
        read = self._patches(pixels, numbers)
        if self.config.norms_pixels:
            read = self._normed(read, self._names.pixels_norm)
        read = self._product(read, self._names.patches)
        if self.config.norms_product:
            read = self._normed(read, self._names.product_norm)
        if self.config.has_class_token:
            return self._rounded(self._with_classes(read).plus(self._tiled()))
        if self.config.num_places is not None:
            return self._rounded(read.plus(self._placed()))
        return read if self.config.num_positions is None else self._rounded(read.plus(self._learned()))

    def patches_normed(self, x: Bounded) -> Bounded:
        return self._normed(x, self._names.patches_norm)

    def attention_read(self, layer: int, x: Bounded) -> Bounded:
        return self._normed(x, self._in(layer, self._names.attention_norm))

    def heads(self, layer: int, read: Bounded) -> list[Bounded]:
        """Return q and k, turned, and v [patches, heads, d]."""
        size, heads = self.config.hidden_size, self.config.num_heads
        parts = [self._bounded_product(read, self._in(layer, it)) for it in self._names.qkv]
        if len(parts) == 1:
            parts = [parts[0].columns(slice(start, start + size)) for start in range(0, 3 * size, size)]
        is_together = self.config.norms_heads_together
        if is_together:
            norms = (self._names.q_norm, self._names.k_norm)
            parts[:2] = [self._rms_normed(it, self._in(layer, name)) for it, name in zip(parts, norms, strict=False)]
        q, k, v = (it.changed(lambda part: part.view(len(part), heads, -1)) for it in parts)
        if self.config.norms_heads and not is_together:
            q, k = (
                self._normed(it, self._in(layer, name))
                for it, name in ((q, self._names.q_norm), (k, self._names.k_norm))
            )
            v = self._normed_alone(v) if self.config.norms_values else v
        return [self._turned(q), self._turned(k), v]

    def sequences(self, layer: int) -> Tensor:
        """Return [patches] a number for each window that patches see in a layer: the same where they see each other."""
        side = self.config.window
        if side is None or layer in self.config.full_layers:
            return torch.zeros_like(self._rows)
        side *= self.config.merge
        return self._rows // side * self._width + self._columns // side

    def attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Bounded:
        """Return [patches, hidden]: each patch sees all of its window, or in some layers of its image."""
        names = self.sequences(layer)
        found = [torch.zeros_like(q, dtype=torch.float64) for _ in range(3)]
        attends = Attends(self.config.scale, is_causal=False)
        for name in torch.unique(names):
            own = names == name
            part = attend(q[own], k[own], v[own], attends, self._precision)
            for whole, of_window in zip(found, (part.truth, part.most, part.deviation), strict=True):
                whole[own] = of_window
        return Bounded(*found).changed(lambda it: it.flatten(1))

    def after_attention(self, layer: int, x: Bounded, attended: Bounded) -> Bounded:
        made = self._bounded_product(attended, self._in(layer, self._names.output))
        if self.config.norms_after:
            made = self._normed(made, self._in(layer, self._names.after_attention))
        if self.config.scales_residuals:
            made = self._rounded(made.times(self._tensor(self._in(layer, self._names.attention_scale))))
        return self._rounded(x.plus(made))

    def feed_forward_read(self, layer: int, x: Bounded) -> Bounded:
        return self._normed(x, self._in(layer, self._names.feed_forward_norm))

    def fed(self, layer: int, read: Bounded) -> Bounded:
        """Return what the last product of a feed-forward reads."""
        inputs = [self._bounded_product(read, self._in(layer, it)) for it in self._names.up]
        gate = gate_of(self.config.activation)
        return function_of((inputs[0], inputs[1]), gate, self._precision) if inputs[1:] else self._bent(inputs[0], gate)

    def after_feed_forward(self, layer: int, x: Bounded, fed: Bounded) -> Bounded:
        made = self._bounded_product(fed, self._in(layer, self._names.down))
        if self.config.norms_after:
            made = self._normed(made, self._in(layer, self._names.after_feed_forward))
        if self.config.scales_residuals:
            made = self._rounded(made.times(self._tensor(self._in(layer, self._names.feed_forward_scale))))
        return self._rounded(x.plus(made))

    def last_normed(self, x: Bounded) -> Bounded:
        """Return the patches behind the last layer, normed before the merger norms them itself."""
        return self._normed(x, self._names.last_norm)

    def merger_read(self, x: Bounded, deepstack: int | None) -> Bounded:
        """Return what the first product of a merger reads, [tokens, merge ** 2 * hidden]; the last one's, or one of
        those behind a layer. Of tokens that are means of patches, those means [tokens, hidden].
        """
        x = x.changed(lambda it: it[: self._num_patches])
        if self.config.merging is Merging.MEAN:
            return self._means(x)
        if self.config.merging is Merging.GATED:
            return self._normed(x, self._names.last_norm).changed(self._merged)
        if not self.config.merger_has_norm:
            return x.changed(self._merged)
        norm, eps = self._of_merger(deepstack, self._names.merger_norm), self.config.merger_eps
        if deepstack is None and not self.config.merger_norms_tokens:
            return self._normed(x, norm, eps).changed(self._merged)
        tokens = x.changed(self._merged)
        if eps is not None and self.config.merger_has_layer_norm:
            return self._layer_normed(tokens, norm, eps)
        return self._normed(tokens, norm, eps)

    def merging(self, read: Bounded, deepstack: int | None) -> Bounded:
        """Return [tokens, hidden] of the patches of each token, of which the product reads one number after another."""
        by_number = read.changed(lambda it: it.view(len(it), self.config.merge**2, -1).transpose(1, 2).flatten(1))
        is_gated = self.config.merging is Merging.GATED
        return self._product(
            by_number, self._names.downsample if is_gated else self._of_merger(deepstack, self._names.merging)
        )

    def merger_gates_read(self, merged: Bounded) -> Bounded:
        """Return what the gated feed-forward of a merger reads, [tokens, out_size]."""
        eps = self.config.norm_eps if self.config.merger_eps is None else self.config.merger_eps
        made = self._product(merged, self._of_merger(None, self._names.first))
        return self._bent(
            self._layer_normed(made, self._of_merger(None, self._names.merger_norm), eps), gate_named("gelu")
        )

    def merger_fed(self, read: Bounded, deepstack: int | None) -> Bounded:
        """Return what the last product of a merger reads."""
        if self.config.merging is Merging.MEAN:
            if not self.config.norms_means:
                return self._normed_alone(read, self.config.merger_eps)
            weight = self._tensor(f"{self._of_merger(None, self._names.merger_norm)}.weight")
            return rms_norm(read, weight + 1, self.config.norm_eps, self._precision)
        if self.config.merging is Merging.GATED:
            gate, up = (self._product(read, self._of_merger(None, it)) for it in self._names.merger_up)
            return function_of((gate, up), gate_of(self.config.activation), self._precision)
        return self._bent(self._product(read, self._of_merger(deepstack, self._names.first)), gate_named("gelu"))

    def merged(self, fed: Bounded, deepstack: int | None) -> Bounded:
        """Return [tokens, out_size], token by token of a row."""
        if self.config.norms_means:
            weight = self._tensor(self._of_merger(None, self._names.second)).T  # it is kept [in, out]
            return self._rounded(product(fed, chunks_of(weight), None, self._precision))
        return self._product(fed, self._of_merger(deepstack, self._names.second))

    def _of_merger(self, deepstack: int | None, name: str) -> str:
        return f"{self._names.merger if deepstack is None else self._names.deepstack.format(deepstack)}.{name}"

    def _in(self, layer: int, name: str) -> str:
        return f"{self._names.layer.format(layer)}.{name}"

    def _means(self, x: Bounded) -> Bounded:
        """Return what the mean of each token's patches is, as their last norm reads it: a sum in fp32, rounded once."""
        if self.config.norms_means:
            return self._pooled(self._normed(x, self._names.last_norm))
        means = self._pooled(x)
        if not self.config.scales_means:
            return means
        means = means.times(x.truth.shape[1] ** 0.5)
        if not self.config.standardizes:
            return self._rounded(means)
        bias, factor = (self._tensor(it) for it in (self._names.mean_bias, self._names.mean_factor))
        off = Bounded(torch.zeros_like(means.truth), 2 * U * (means.truth.abs() + bias.abs()), means.truth * 0)
        return self._rounded(means.plus(Bounded.exact(-bias.expand_as(means.truth))).plus(off).times(factor))

    def _placed(self) -> Bounded:
        """Return the learned position of each patch: that of its column and that of its row."""
        tables = self._tensor(self._names.positions)
        of_columns, of_rows = tables.transpose(0, 1) if self.config.places_first else tables
        return self._rounded(Bounded.exact(of_columns[self._columns]).plus(Bounded.exact(of_rows[self._rows])))

    def _bounded_product(self, x: Bounded, name: str) -> Bounded:
        """Return a product of a layer, which may bound what it reads and what it makes."""
        if not self.config.has_bounds:
            return self._product(x, name)
        low, high, least, most = (
            float(self._tensor(f"{name.rpartition('.')[0]}.{it}"))
            for it in ("input_min", "input_max", "output_min", "output_max")
        )
        found = self._product(Bounded(x.truth.clamp(low, high), x.most, x.deviation), name)
        return Bounded(found.truth.clamp(least, most), found.most, found.deviation)

    def _merged(self, patches: Tensor) -> Tensor:
        """Return [tokens, merge ** 2 * hidden]: of each token its patches, row by row."""
        merge = self.config.merge
        found = patches.view(self._height // merge, merge, self._width // merge, merge, -1).transpose(1, 2)
        return found.reshape(self._height * self._width // merge**2, -1)

    def _pooled(self, patches: Bounded) -> Bounded:
        """Return the mean of each token's patches [tokens, hidden], which is summed in fp32 and rounded once."""
        count = self.config.merge**2

        def mean(it: Tensor) -> Tensor:
            return self._merged(it).view(-1, count, it.shape[1]).mean(1)

        of_sum = (count + 1) * U * mean(patches.truth.abs())
        return self._rounded(Bounded(mean(patches.truth), mean(patches.most) + of_sum, mean(patches.deviation)))

    def _patches(self, pixels: Tensor, numbers: PixelNumbers) -> Bounded:
        """Return [patches, numbers]: of each colour every frame, which are all the same, of each the rows."""
        side, frames = self.config.patch_size, self.config.num_frames
        mean, deviation = (torch.tensor(it, dtype=torch.float64) for it in (numbers.mean, numbers.deviation))
        values = pixels.double() * numbers.factor
        size = (values.abs() + mean.abs()) / deviation
        kinds = []
        for it in ((values - mean) / deviation, torch.zeros_like(values), _OF_PIXELS * U * size):
            squares = [
                it[row * side : (row + 1) * side, column * side : (column + 1) * side]
                for row in range(self._height)
                for column in range(self._width)
            ]
            if self.config.reads_colours_last:
                kinds.append(torch.stack([square.flatten() for square in squares]))
                continue
            rows = [square.permute(2, 0, 1).unsqueeze(1) for square in squares]
            kinds.append(torch.stack([row.expand(-1, frames, -1, -1).flatten() for row in rows]))
        truth, most, off = (it.to(self._checkpoint.device) for it in kinds)
        return self._rounded(Bounded(truth, most + off, torch.zeros_like(most)))

    def _learned(self) -> Bounded:
        """Return the learned position of each patch: between the square's points by the distance to four of them, or by
        a cubic convolution of sixteen.
        """
        interpolation = self.config.interpolation
        side = self.config.num_positions
        assert side is not None
        square = self._tensor(self._names.positions).view(side, side, -1)
        truth = torch.zeros(len(self._rows), square.shape[-1], dtype=torch.float64, device=square.device)
        size = torch.zeros_like(truth)
        is_cubic = interpolation is Interpolation.CUBIC
        is_between_corners = interpolation is Interpolation.CORNERS
        for place, corner in self._corners(side) if is_between_corners else self._points(side, is_cubic=is_cubic):
            weight, value = place[:, None], square[corner]
            truth += weight * value
            # Of a place in fp32: its share of a cell errs by as much of the square. A cubic weight changes by 1.5 of
            # that at most, and is at most 1.
            size += (6 if is_cubic else 4) * U * side * value.abs()
        return self._rounded(Bounded(truth, size, torch.zeros_like(size)))

    def _corners(self, side: int) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Return the weight and the place of each of the four points around each patch."""
        axes = []
        for places, count in ((self._rows, self._height), (self._columns, self._width)):
            exact = places.double() * (side - 1) / max(count - 1, 1)
            low = exact.floor().clamp(max=side - 2)
            axes.append([(1 - (exact - low), low.long()), (exact - low, low.long() + 1)])
        return [(of_row * of_column, (row, column)) for of_row, row in axes[0] for of_column, column in axes[1]]

    def _with_classes(self, patches: Bounded) -> Bounded:
        """Return the patches, and the class tokens behind them."""
        token = self._tensor(self._names.class_token).view(1, -1)
        own = Bounded.exact(token.expand(len(self._rows) - self._num_patches, -1))
        parts = zip((patches.truth, patches.most, patches.deviation), (own.truth, own.most, own.deviation), strict=True)
        return Bounded(*(torch.cat(both) for both in parts))

    def _tiled(self) -> Bounded:
        """Return the learned position of each patch within its tile, and that of the class tokens, the first one."""
        side = self.config.num_positions
        assert side is not None
        places = 1 + self._rows % side * side + self._columns
        places[self._num_patches :] = 0
        return Bounded.exact(self._tensor(self._names.positions)[0, places])

    def _points(self, side: int, *, is_cubic: bool) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Return the weight and the place of each of the four, or sixteen, points around the middle of each patch."""
        axes, steps, weight = [], range(-1, 3) if is_cubic else range(2), _cubic if is_cubic else _linear
        for places, count in ((self._rows, self._height), (self._columns, self._width)):
            exact = (places.double() + 0.5) * side / count - 0.5
            near = exact.floor()
            axes.append([(weight((exact - near - it).abs()), (near + it).long().clamp(0, side - 1)) for it in steps])
        return [(of_row * of_column, (row, column)) for of_row, row in axes[0] for of_column, column in axes[1]]

    def _turned(self, x: Bounded) -> Bounded:
        """Turn the halves of each head against each other: the first pairs by the row, as many by the column.

        A head whose halves are each turned by itself comes out in that order too, its columns first.
        """
        size, theta = self.config.head_dim, self.config.rope_theta
        if theta is None:
            return x
        numbers = torch.arange(0, size, 4, dtype=torch.float64, device=self._rows.device)
        later = 2 if self.config.alternates_rates else 0  # of the head's rates a column has the next one
        of_both = [(self._rows, numbers), (self._columns, numbers + later)]
        if self.config.splits_heads:
            x = x.changed(lambda it: it.view(*it.shape[:2], 2, 2, -1).transpose(2, 3).flatten(2))
            of_both.reverse()
        angles = torch.cat([places.double()[:, None] * theta ** (-it / size) for places, it in of_both], dim=1)
        return self._rounded(turn(x, angles, theta))

    def _normed(self, x: Bounded, name: str, eps: float | None = None) -> Bounded:
        eps = self.config.norm_eps if eps is None else eps
        return self._rms_normed(x, name, eps) if self.config.has_rms_norms else self._layer_normed(x, name, eps)

    def _rms_normed(self, x: Bounded, name: str, eps: float | None = None) -> Bounded:
        eps = self.config.norm_eps if eps is None else eps
        return rms_norm(x, self._tensor(f"{name}.weight"), eps, self._precision)

    def _layer_normed(self, x: Bounded, name: str, eps: float) -> Bounded:
        weight, bias = (self._tensor(f"{name}.{word}") for word in ("weight", "bias"))
        return layer_norm(x, weight, eps, self._precision, bias)

    def _normed_alone(self, x: Bounded, eps: float | None = None) -> Bounded:
        """Return an RMSNorm without a weight."""
        eps = self.config.norm_eps if eps is None else eps
        return rms_norm(x, torch.ones_like(x.truth[..., :1]), eps, self._precision)

    def _bent(self, x: Bounded, gate: Gate) -> Bounded:
        ones = Bounded.exact(torch.ones_like(x.truth))
        return function_of((x, ones), gate, self._precision)

    def _product(self, x: Bounded, name: str) -> Bounded:
        weight = self._tensor(f"{name}.weight").flatten(1)
        has_bias = self._checkpoint.has(self._written(f"{name}.bias"))
        bias = self._tensor(f"{name}.bias") if has_bias else None
        return self._rounded(product(x, chunks_of(weight), bias, self._precision))

    def _tensor(self, name: str) -> Tensor:
        return self._precision.stored(self._checkpoint.tensor(self._written(name)))

    def _written(self, name: str) -> str:
        return self._names.written(name)[self._way]

    def _rounded(self, value: Bounded) -> Bounded:
        return self._precision.rounded(value)


def _linear(distance: Tensor) -> Tensor:
    """Return the weight of a point that is at most 1 away."""
    return 1 - distance


def _cubic(distance: Tensor) -> Tensor:
    """Return the weight of a point in a cubic convolution of the slope a = -3/4. Source: Keys 1981, equation 4."""
    a, x = -0.75, distance
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return torch.where(x <= 1, near, far)
