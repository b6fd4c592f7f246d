"""The weights of a tower, and what a checkpoint calls them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from kernels.linear.shape import PLAIN
from qualification.model.tower import Merging, TowerConfig, TowerNames
from server.model.linear import Linear

BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")


class TowerWeight(Enum):
    """A product of a tower: of its layers, then of what makes tokens of patches."""

    PATCHES = "tower_patches"
    QKV = "tower_qkv"
    OUTPUT = "tower_output"
    UP = "tower_up"
    DOWN = "tower_down"
    MERGING = "tower_merging"
    MERGER_FIRST = "tower_merger_first"
    MERGER_UP = "tower_merger_up"
    MERGER_SECOND = "tower_merger_second"

    @property
    def is_of_tokens(self) -> bool:
        """Return whether its rows are tokens of the prompt, and not patches."""
        own = TowerWeight
        return self in (own.MERGING, own.MERGER_FIRST, own.MERGER_UP, own.MERGER_SECOND)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Factors [size], and what is added behind them, None for an RMSNorm."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of what the products of a layer read and make, [parts of the product, 4]: as `BOUNDS`."""

    qkv: Tensor
    output: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """`up`: of a gated feed-forward gate, then up. Norms of heads [head_dim], or of all together
    [hidden], norms behind, and what multiplies results [hidden], None without them.
    """

    attention_norm: NormWeights
    qkv: Linear
    output: Linear
    feed_forward_norm: NormWeights
    up: Linear
    down: Linear
    bounds: Bounds | None = None
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    after_attention: NormWeights | None = None
    after_feed_forward: NormWeights | None = None
    attention_scale: Tensor | None = None
    feed_forward_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes one token of the patches that are merged.

    norm          None: they are not normed
    norms_tokens  whether it norms them together, not each
    merging       makes one patch's numbers of theirs, before the two products; None: those read all
    """

    norm: NormWeights | None
    first: Linear
    second: Linear
    norms_tokens: bool
    merging: Linear | None = None


@dataclass(frozen=True, slots=True)
class MeanMerger:
    """Makes one token of the mean of its patches.

    norm          of each patch, before their mean; None: they are not normed
    token_norm    [hidden]: the RMSNorm of the mean multiplies by 1 + these; None: it has no weight
    bias, factor  [hidden]: the mean becomes (mean - bias) * factor before it is normed; None: it does not
    """

    product: Linear
    norm: NormWeights | None = None
    token_norm: Tensor | None = None
    bias: Tensor | None = None
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GatedMerger:
    """Makes one token of the patches that are merged: `merging` reads those of a token, normed each.

    inner_norm  a LayerNorm behind `first`; `up`: gate, then up
    """

    norm: NormWeights
    merging: Linear
    first: Linear
    inner_norm: NormWeights
    up: Linear
    second: Linear


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """positions     [side ** 2, hidden], behind that of the class token where there is one, or [2, places, hidden] of
                  columns and rows, or None
    class_token   [hidden], or None
    patches_norm  None where patches are not normed; pixels_norm, product_norm: before the product and behind it;
                  last_norm: behind the last layer, before the merger's own
    deepstack     one of each of those layers
    """

    patches: Linear
    patches_norm: NormWeights | None
    positions: Tensor | None
    layers: tuple[TowerLayer, ...]
    merger: Merger | MeanMerger | GatedMerger
    deepstack: tuple[Merger, ...]
    pixels_norm: NormWeights | None = None
    product_norm: NormWeights | None = None
    last_norm: NormWeights | None = None
    class_token: Tensor | None = None

    def named(self, config: TowerConfig) -> dict[str, Tensor]:
        """Return each tensor by its name in a checkpoint, as `TowerNames` has it."""
        names = config.names
        found = dict(_of_linear(names.patches, self.patches))
        norms = {names.patches_norm: self.patches_norm, names.pixels_norm: self.pixels_norm}
        for name, norm in {**norms, names.product_norm: self.product_norm, names.last_norm: self.last_norm}.items():
            if norm is not None:
                found |= _of_norm(name, norm)
        if self.positions is not None:
            found[names.positions] = self.positions.transpose(0, 1) if config.places_first else self.positions
        if self.class_token is not None:
            found[names.class_token] = self.class_token.view(1, 1, -1)
            found[names.positions] = found[names.positions].unsqueeze(0)
        for index, layer in enumerate(self.layers):
            found |= {f"{names.layer.format(index)}.{name}": it for name, it in _of_layer(layer, names)}
        mergers: dict[str, Merger] = {}
        if isinstance(self.merger, Merger):
            mergers = {names.merger: self.merger}
        elif isinstance(self.merger, GatedMerger):
            found |= _of_gated(self.merger, names)
        else:
            found |= _of_means(self.merger, names)
        mergers |= {names.deepstack.format(index): it for index, it in enumerate(self.deepstack)}
        for name, merger in mergers.items():
            found |= {f"{name}.{it}": tensor for it, tensor in _of_merger(merger, names)}
        return found


def empty_tower(config: TowerConfig, dtype: torch.dtype, device: torch.device) -> TowerWeights:
    """Return weights that are not yet filled."""
    empty = _Empty(config, dtype, device)
    return TowerWeights(
        patches=empty.linear(config.patch_numbers, config.hidden_size, bias=config.has_patch_bias),
        patches_norm=empty.norm() if config.norms_patches else None,
        positions=empty.positions(),
        layers=tuple(empty.layer() for _ in range(config.num_layers)),
        merger=empty.last_merger(),
        deepstack=tuple(empty.merger(norms_tokens=True) for _ in config.deepstack),
        pixels_norm=empty.norm(config.patch_numbers) if config.norms_pixels else None,
        product_norm=empty.norm() if config.norms_product else None,
        last_norm=empty.norm() if config.norms_last else None,
        class_token=empty.tensor(config.hidden_size) if config.has_class_token else None,
    )


@dataclass(frozen=True, slots=True)
class _Empty:
    """Makes the parts of a tower, not yet filled."""

    config: TowerConfig
    dtype: torch.dtype
    device: torch.device

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear(self, size_in: int, size_out: int, *, bias: bool) -> Linear:
        return Linear.empty(size_in, size_out, bias, PLAIN, self.dtype, self.device)

    def norm(self, size: int | None = None, *, has_bias: bool | None = None) -> NormWeights:
        """Return a norm of so many numbers, None for those of a patch; with a bias as those of layers by default."""
        weight = self.tensor(self.config.hidden_size if size is None else size)
        with_bias = not self.config.has_rms_norms if has_bias is None else has_bias
        return NormWeights(weight, torch.empty_like(weight) if with_bias else None)

    def mergers_products(self) -> list[Linear]:
        return [self.linear(it[0], it[1], bias=it[2]) for it in self.config.merger_products]

    def positions(self) -> Tensor | None:
        config = self.config
        if config.num_positions is not None:
            return self.tensor(config.num_positions**2 + config.has_class_token, config.hidden_size)
        return None if config.num_places is None else self.tensor(2, config.num_places, config.hidden_size)

    def layer(self) -> TowerLayer:
        config, hidden = self.config, self.config.hidden_size
        has_biases, parts = config.has_biases, len(config.names.up)
        bounds = Bounds(*(self.tensor(it, 4) for it in (3, 1, parts, 1))) if config.has_bounds else None
        of_heads = hidden if config.norms_heads_together else config.head_dim
        return TowerLayer(
            self.norm(),
            self.linear(hidden, 3 * hidden, bias=has_biases if config.has_qkv_bias is None else config.has_qkv_bias),
            self.linear(hidden, hidden, bias=has_biases),
            self.norm(),
            self.linear(hidden, config.width * parts, bias=has_biases),
            self.linear(config.width, hidden, bias=has_biases),
            bounds,
            q_norm=self.norm(of_heads, has_bias=False) if config.norms_heads else None,
            k_norm=self.norm(of_heads, has_bias=False) if config.norms_heads else None,
            after_attention=self.norm() if config.norms_after else None,
            after_feed_forward=self.norm() if config.norms_after else None,
            attention_scale=self.tensor(hidden) if config.scales_residuals else None,
            feed_forward_scale=self.tensor(hidden) if config.scales_residuals else None,
        )

    def merger(self, *, norms_tokens: bool) -> Merger:
        size = self.config.hidden_size * self.config.merge**2
        *merging, first, second = self.mergers_products()
        norm = self.norm(size if norms_tokens else None, has_bias=self.config.merger_has_layer_norm or None)
        return Merger(
            norm if self.config.merger_has_norm else None,
            first,
            second,
            norms_tokens,
            merging[0] if merging else None,
        )

    def last_merger(self) -> Merger | MeanMerger | GatedMerger:
        config, hidden = self.config, self.config.hidden_size
        if config.merging is Merging.GATED:
            merging, first, up, second = self.mergers_products()
            inner = self.norm(config.out_size, has_bias=True)
            return GatedMerger(self.norm(), merging, first, inner, up, second)
        if config.merging is not Merging.MEAN:
            return self.merger(norms_tokens=config.merger_norms_tokens)
        (product,) = self.mergers_products()
        if config.norms_means:
            return MeanMerger(product, self.norm(), self.tensor(hidden))
        bias, factor = (self.tensor(hidden) if config.standardizes else None for _ in range(2))
        return MeanMerger(product, bias=bias, factor=factor)


def as_computed(weights: TowerWeights, config: TowerConfig) -> TowerWeights:
    """Return filled weights in the form in which they are computed: patch by patch, and padded; colours one behind
    the other; of split heads the numbers that are turned first before those that these are turned with.
    """
    if isinstance(weights.merger, Merger | GatedMerger) and weights.merger.merging is not None:
        values = weights.merger.merging.weight.stored["weight"].values
        values.copy_(values.view(len(values), -1, config.merge**2).transpose(1, 2).flatten(1))
    if config.reads_colours_last:
        values = weights.patches.weight.stored["weight"].values
        norm = weights.pixels_norm
        of_pixels = () if norm is None else (norm.weight[None], *(() if norm.bias is None else (norm.bias[None],)))
        for rows in (values, *of_pixels):
            rows.copy_(rows.view(len(rows), -1, 3).transpose(1, 2).flatten(1))
    if config.splits_heads:
        for layer in weights.layers:
            norms = [it.weight for it in (layer.q_norm, layer.k_norm) if it is not None]
            for rows in (layer.qkv.weight.stored["weight"].values[: 2 * config.hidden_size], *norms):
                quarters = rows.view(-1, 2, 2, config.head_dim // 4, *rows.shape[1:])
                rows.copy_(quarters.transpose(1, 2).reshape(rows.shape))
    return _with_padded_width(weights, config)


def _with_padded_width(weights: TowerWeights, config: TowerConfig) -> TowerWeights:
    """Return filled weights whose feed-forwards are as wide as they are computed: what is added changes no result."""
    if config.padded_width == config.width:
        return weights
    layers = []
    for layer in weights.layers:
        up = _padded_rows(layer.up, config, num_parts=2 if config.is_gated else 1)
        layers.append(replace(layer, up=up, down=_padded_columns(layer.down, config)))
    return replace(weights, layers=tuple(layers))


def _padded_rows(linear: Linear, config: TowerConfig, *, num_parts: int) -> Linear:
    """Return a product whose parts have rows of zeros behind them."""
    values, width = linear.weight.stored["weight"].values, config.padded_width
    found = Linear.empty(
        values.shape[1], num_parts * width, linear.bias is not None, PLAIN, values.dtype, values.device
    )
    for whole, own in ((found.weight.stored["weight"].values, values), (found.bias, linear.bias)):
        if whole is not None and own is not None:
            whole.zero_()
            parts = whole.view(num_parts, width, *whole.shape[1:])
            parts[:, : config.width] = own.view(num_parts, config.width, *own.shape[1:])
    return found


def _padded_columns(linear: Linear, config: TowerConfig) -> Linear:
    values = linear.weight.stored["weight"].values
    found = Linear.empty(config.padded_width, values.shape[0], False, PLAIN, values.dtype, values.device)
    own = found.weight.stored["weight"].values
    own.zero_()
    own[:, : config.width] = values
    return replace(found, bias=linear.bias)


def tower_shapes(config: TowerConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor in a checkpoint, which has that of the patches' product in five dims, or four."""
    empty = empty_tower(config, torch.float32, torch.device("meta")).named(config)
    found = {name: tuple(it.shape) for name, it in empty.items()}
    side, frames = config.patch_size, (config.num_frames,) if config.num_frames > 1 else ()
    found |= {name: () for name in found if name.endswith(BOUNDS)}
    if config.merging is Merging.GATED:
        found |= {
            f"{config.names.downsample}.weight": (config.out_size, config.hidden_size, config.merge, config.merge)
        }
    if config.reads_colours_last:
        return found
    return found | {f"{config.names.patches}.weight": (config.hidden_size, 3, *frames, side, side)}


def tower_bytes(config: TowerConfig, num_bytes: int) -> int:
    """Return the bytes of all weights, each number of so many."""
    weights = empty_tower(config, torch.float32, torch.device("meta"))
    return num_bytes * sum(it.numel() for it in weights.named(config).values())


def _of_linear(name: str, linear: Linear) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", linear.weight.stored["weight"].values
    if linear.bias is not None:
        yield f"{name}.bias", linear.bias


def _of_norm(name: str, norm: NormWeights) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", norm.weight
    if norm.bias is not None:
        yield f"{name}.bias", norm.bias


def _of_layer(layer: TowerLayer, names: TowerNames) -> Iterator[tuple[str, Tensor]]:
    yield from _of_norm(names.attention_norm, layer.attention_norm)
    yield from _of_norm(names.feed_forward_norm, layer.feed_forward_norm)
    yield from _of_linear(names.output, layer.output)
    yield from _of_linear(names.down, layer.down)
    for parts, linear in ((names.qkv, layer.qkv), (names.up, layer.up)):
        sizes = [linear.weight.size[0] // len(parts)] * len(parts)
        for name, part in zip(parts, linear.split(*sizes), strict=True):
            yield from _of_linear(name, part)
    norms = {names.q_norm: layer.q_norm, names.k_norm: layer.k_norm}
    norms |= {names.after_attention: layer.after_attention, names.after_feed_forward: layer.after_feed_forward}
    for name, norm in norms.items():
        if norm is not None:
            yield from _of_norm(name, norm)
    for name, scale in (
        (names.attention_scale, layer.attention_scale),
        (names.feed_forward_scale, layer.feed_forward_scale),
    ):
        if scale is not None:
            yield name, scale
    if layer.bounds is not None:
        yield from _of_bounds(names.qkv, layer.bounds.qkv)
        yield from _of_bounds((names.output,), layer.bounds.output)
        yield from _of_bounds(names.up, layer.bounds.up)
        yield from _of_bounds((names.down,), layer.bounds.down)


def _of_bounds(products: tuple[str, ...], bounds: Tensor) -> Iterator[tuple[str, Tensor]]:
    for product, of_product in zip(products, bounds, strict=True):
        for index, name in enumerate(BOUNDS):
            yield f"{product.rpartition('.')[0]}{name}", of_product[index : index + 1]


def _of_means(merger: MeanMerger, names: TowerNames) -> Iterator[tuple[str, Tensor]]:
    product = f"{names.merger}.{names.second}"
    if merger.norm is None or merger.token_norm is None:
        yield from _of_linear(product, merger.product)
    else:
        yield from _of_norm(names.last_norm, merger.norm)
        yield f"{names.merger}.{names.merger_norm}.weight", merger.token_norm
        yield product, merger.product.weight.stored["weight"].values.t()  # it is kept [in, out]
    if merger.bias is not None and merger.factor is not None:
        yield from ((names.mean_bias, merger.bias), (names.mean_factor, merger.factor))


def _of_gated(merger: GatedMerger, names: TowerNames) -> Iterator[tuple[str, Tensor]]:
    yield from _of_norm(names.last_norm, merger.norm)
    yield from _of_linear(names.downsample, merger.merging)
    yield from _of_linear(f"{names.merger}.{names.first}", merger.first)
    yield from _of_norm(f"{names.merger}.{names.merger_norm}", merger.inner_norm)
    half = merger.up.weight.size[0] // 2
    for name, part in zip(names.merger_up, merger.up.split(half, half), strict=True):
        yield from _of_linear(f"{names.merger}.{name}", part)
    yield from _of_linear(f"{names.merger}.{names.second}", merger.second)


def _of_merger(merger: Merger, names: TowerNames) -> Iterator[tuple[str, Tensor]]:
    if merger.norm is not None:
        yield from _of_norm(names.merger_norm, merger.norm)
    yield from _of_linear(names.first, merger.first)
    yield from _of_linear(names.second, merger.second)
    if merger.merging is not None:
        yield from _of_linear(names.merging, merger.merging)
