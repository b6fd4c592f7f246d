"""The tower: pixels of images to embeddings of a prompt's tokens. One class for the towers that are known."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.fused.turn_heads import turn_heads
from qualification.model.tower import TowerActivation, TowerConfig
from server.model.linear import Product
from server.model.vision.geometry import Geometry, Grid, learned_positions, placed, rotation, tiled_positions
from server.model.vision.operators import Attend, BoundedProduct, FirstPaths, TowerOperators
from server.model.vision.weights import (
    GatedMerger,
    MeanMerger,
    Merger,
    NormWeights,
    TowerLayer,
    TowerWeight,
    TowerWeights,
)

_MOST_KNOWN_PATCHES = 2**17  # of which the places are kept, 350 bytes each: made anew they take the host 3 ms


def _quick_gelu(x: Tensor) -> Tensor:
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


_ACTIVATIONS: dict[Activation | TowerActivation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
    TowerActivation.QUICK_GELU: _quick_gelu,
}


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as the tower reads it: pixel times `factor`, less `mean`, over `deviation`, of red, green and blue."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    factor: float = 1 / 255


@dataclass(frozen=True, slots=True)
class Image:
    """pixels   [height * patch_size, width * patch_size, 3] uint8, contiguous, on the CPU
    grid     patches: height and width
    """

    pixels: Tensor
    grid: Grid

    @classmethod
    def of(cls, pixels: bytes, grid: Grid, patch_size: int) -> "Image":
        """Return an image of its pixels as they are sent."""
        height, width = grid
        values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return cls(values.view(height * patch_size, width * patch_size, 3), grid)


@dataclass(frozen=True, slots=True)
class _Places:
    """A geometry on the device: see there. `windows`, `images`: where sequences end, and the longest one's length.

    turns   None where nothing is rotated
    classes, patches   None where each row is a patch
    """

    order: Tensor
    tokens: Tensor
    turns: tuple[Tensor, Tensor] | None
    windows: tuple[Tensor, int]
    images: tuple[Tensor, int]
    classes: Tensor | None
    patches: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Products with the weights of a layer."""

    qkv: Product
    output: Product
    up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class _GatedProducts:
    """Products with the weights of a merger that is gated."""

    merging: Product
    first: Product
    up: Product
    second: Product


class TowerBorder(Enum):
    """Places at which a tower hands out what it computes; patches stand in the order of its geometry."""

    PATCHED = "patches"
    PATCHES_NORMED = "normed patches"
    ATTENTION_READ = "what attention reads"
    SEQUENCES = "windows of patches"  # where those end that see each other, [windows + 1]
    QUERIES = "queries"
    KEYS = "keys"
    VALUES = "values"
    ATTENDED = "attention"
    BEHIND_ATTENTION = "residual behind attention"
    FEED_FORWARD_READ = "what the feed-forward reads"
    FED = "activation"
    BEHIND_FEED_FORWARD = "residual behind the feed-forward"
    LAST_NORMED = "normed patches behind the last layer"
    MERGER_READ = "what the merger reads"
    MERGED = "merged patches"
    MERGER_GATES_READ = "what the merger's gates read"
    MERGER_FED = "what the merger's last product reads"


# (border, layer; of a merger which one of those behind layers, None for the last one) -> takes the tensor
Observe = Callable[[TowerBorder, int | None, Tensor], None]


class Tower:
    """Computes images by the operators that it is given; of them it keeps where the patches of their sizes stand.

    beat   called before each layer, of steps on a CPU: set by who must hear that a long one makes progress
    observe   is handed what is computed at each border, in the order in which it is: set by who checks it
    """

    def __init__(
        self,
        config: TowerConfig,
        weights: TowerWeights,
        pixels: Pixels,
        *,
        is_reproducible: bool,
        operators: TowerOperators | None = None,
    ) -> None:
        """`is_reproducible`: whether no image's bits may depend on the others: each is then computed by itself.

        `operators`: None for the first paths that can.
        """
        self.config = config
        self.weights = weights
        self.beat: Callable[[], None] | None = None
        self.observe: Observe | None = None
        self._is_reproducible = is_reproducible
        device = self.device
        self._known: OrderedDict[tuple[Grid, ...], _Places] = OrderedDict()  # the latest used last
        self._operators: TowerOperators = FirstPaths(config.scale) if operators is None else operators
        of = self._operators.product
        self._patched = of(None, TowerWeight.PATCHES, weights.patches)
        self._layers = tuple([self._products(index, it) for index, it in enumerate(weights.layers)])
        self._ones = torch.ones(max(config.head_dim, config.hidden_size), device=device)  # of norms without a weight
        self._tokens = self._last_merger(weights.merger)
        self._deepstack = tuple(self._merger(place, it) for place, it in enumerate(weights.deepstack))
        self._mean = torch.tensor(pixels.mean, device=device) / pixels.factor
        self._deviation = torch.tensor(pixels.deviation, device=device) / pixels.factor

    @property
    def device(self) -> torch.device:
        return self.weights.patches.weight.device

    @property
    def dtype(self) -> torch.dtype:
        norm = self.weights.layers[0].attention_norm if self.weights.layers else self.weights.patches_norm
        assert norm is not None, "a tower without layers norms its patches"
        return norm.weight.dtype

    @torch.inference_mode()
    def encode(self, images: Sequence[Image]) -> Tensor:
        """Return what the tokens of one image or more read, one image after another, [tokens, row_size].

        The first `out_size` numbers of a row are the token's embedding, the next ones are added to the residual behind
        the first layer of the text, and so on.
        """
        if self._is_reproducible and len(images) > 1:
            return torch.cat([self._encode([image]) for image in images])
        return self._encode(images)

    def _encode(self, images: Sequence[Image]) -> Tensor:
        config, grids = self.config, tuple([image.grid for image in images])
        places = self._places(grids)
        order, turns = places.order, places.turns
        self._operators.begin(order.numel(), places.tokens.numel(), len(images))
        patches = torch.cat([self._patches(image) for image in images])
        if places.classes is not None:
            patches = F.pad(patches, (0, 0, 0, places.classes.numel()))
        patches = patches.index_select(0, order)
        if self.weights.pixels_norm is not None:
            patches = self._normed(self.weights.pixels_norm, patches)
        hidden = self._patched(patches, None)
        if self.weights.product_norm is not None:
            hidden = self._normed(self.weights.product_norm, hidden)
        if places.classes is not None and self.weights.class_token is not None:
            hidden[places.classes] = self.weights.class_token
        if self.weights.positions is not None:
            if config.has_class_token and config.num_positions is not None:
                positions = tiled_positions(self.weights.positions, config.num_positions, grids)
            elif config.num_positions is None:
                positions = placed(self.weights.positions, grids)
            else:
                positions = learned_positions(self.weights.positions, config.num_positions, grids, config.interpolation)
            hidden = hidden + positions.index_select(0, order).to(hidden.dtype)
        self._hand(TowerBorder.PATCHED, None, hidden)
        if self.weights.patches_norm is not None:
            hidden = self._hand(TowerBorder.PATCHES_NORMED, None, self._normed(self.weights.patches_norm, hidden))
        windows, whole = (self._operators.attend(*it) for it in (places.windows, places.images))
        added, fed = [], None
        for index, layer in enumerate(self.weights.layers):
            if self.beat is not None:
                self.beat()
            is_full = config.window is None or index in config.full_layers
            self._hand(TowerBorder.SEQUENCES, index, (places.images if is_full else places.windows)[0])
            hidden, fed = self._layer(index, layer, hidden, fed, turns, whole if is_full else windows)
            if index in config.deepstack or index == config.num_layers - 1:
                hidden, fed = self._hand(TowerBorder.BEHIND_FEED_FORWARD, index, hidden + fed), None
            if index in config.deepstack:
                place = config.deepstack.index(index)
                added.append(self._deepstack[place](hidden))
        if places.patches is not None:
            hidden = hidden.index_select(0, places.patches)
        if self.weights.last_norm is not None:
            hidden = self._hand(TowerBorder.LAST_NORMED, None, self._normed(self.weights.last_norm, hidden))
        found = torch.cat((self._tokens(hidden), *added), dim=1)
        return found.index_select(0, places.tokens)

    def _places(self, grids: tuple[Grid, ...]) -> "_Places":
        """Return where the patches of such images stand: known ones as they were made, the latest few."""
        found = self._known.get(grids)
        if found is None:
            geometry = Geometry.of(self.config, grids)
            turns = rotation(self.config, self._sent(geometry.rows), self._sent(geometry.columns))
            sent = self._sent(geometry.order), self._sent(geometry.tokens)
            found = self._known[grids] = _Places(
                *sent,
                turns,
                self._ends(geometry.windows),
                self._ends(geometry.images),
                *(
                    self._sent(it) if self.config.has_class_token else None
                    for it in (geometry.classes, geometry.patches)
                ),
            )
            while len(self._known) > 1 and sum(it.order.numel() for it in self._known.values()) > _MOST_KNOWN_PATCHES:
                self._known.popitem(last=False)
        self._known.move_to_end(grids)
        return found

    def _sent(self, value: Tensor) -> Tensor:
        """Copy a tensor from the CPU, by way of pinned memory: another copy would wait for all launches before it."""
        is_there = value.device.type == self.device.type
        return value if is_there else value.pin_memory().to(self.device, non_blocking=True)

    def _patches(self, image: Image) -> Tensor:
        """Return an image's patches row by row, [patches, numbers], of each colour all frames, of each all rows."""
        (height, width), side, frames = image.grid, self.config.patch_size, self.config.num_frames
        numbers = ((self._sent(image.pixels).float() - self._mean) / self._deviation).to(self.dtype)
        found = numbers.view(height, side, width, side, 3).permute(0, 2, 4, 1, 3)
        return found.unsqueeze(3).expand(-1, -1, -1, frames, -1, -1).reshape(height * width, -1)

    def _ends(self, lengths: tuple[int, ...]) -> tuple[Tensor, int]:
        """Return where sequences of these lengths end, [sequences + 1] int32, and the longest one's length."""
        return self._sent(torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)), max(lengths)

    def _layer(
        self,
        index: int,
        layer: TowerLayer,
        hidden: Tensor,
        fed: Tensor | None,
        turns: tuple[Tensor, Tensor] | None,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual behind attention, and what the feed-forward adds to it.

        hidden   the residual, which may be written to
        fed      what the layer before adds to it, None where that is done
        """
        products, shape = self._layers[index], (hidden.shape[0], self.config.num_heads, self.config.head_dim)
        if fed is None:
            read = self._normed(layer.attention_norm, hidden)
        else:
            read, hidden = self._added(layer.attention_norm, fed, hidden)
            self._hand(TowerBorder.BEHIND_FEED_FORWARD, index - 1, hidden)
        self._hand(TowerBorder.ATTENTION_READ, index, read)
        qkv = products.qkv(read, None)
        if layer.q_norm is not None and layer.k_norm is not None:
            weights = [layer.q_norm.weight, layer.k_norm.weight]
            weights += [self._ones[: shape[2]]] if self.config.norms_values else []
            for part, weight in zip(qkv.chunk(3, 1), weights, strict=False):
                heads = part.reshape(-1, weight.numel())
                part.copy_(rms_norm(heads, weight, self.config.norm_eps).view(part.shape))
        if turns is not None:
            turn_heads(qkv, *turns, self.config.num_heads)
        q, k, v = (it.view(shape) for it in qkv.chunk(3, 1))
        self._hand(TowerBorder.QUERIES, index, q)
        self._hand(TowerBorder.KEYS, index, k)
        self._hand(TowerBorder.VALUES, index, v)
        attended = self._hand(TowerBorder.ATTENDED, index, attend.run(index, q, k, v).view(hidden.shape))
        made = products.output(attended, None)
        if layer.after_attention is not None:
            made = self._normed(layer.after_attention, made)
        if layer.attention_scale is not None:
            made = made * layer.attention_scale
        read, hidden = self._added(layer.feed_forward_norm, made, hidden)
        self._hand(TowerBorder.BEHIND_ATTENTION, index, hidden)
        self._hand(TowerBorder.FEED_FORWARD_READ, index, read)
        up, activation = products.up(read, None), self.config.activation
        if self.config.is_gated:
            assert isinstance(activation, Activation), "those of towers alone gate nothing"
            fed = gated(up, activation)
        else:
            fed = _ACTIVATIONS[activation](up)
        self._hand(TowerBorder.FED, index, fed[:, : self.config.width])
        made = products.down(fed, None)
        if layer.feed_forward_scale is not None:
            made = made * layer.feed_forward_scale
        return hidden, made if layer.after_feed_forward is None else self._normed(layer.after_feed_forward, made)

    def _products(self, index: int, layer: TowerLayer) -> "_Layer":
        """Return the products of a layer, within their bounds where it has such."""
        of, bounds = self._operators.product, layer.bounds
        found = _Layer(
            of(index, TowerWeight.QKV, layer.qkv),
            of(index, TowerWeight.OUTPUT, layer.output),
            of(index, TowerWeight.UP, layer.up),
            of(index, TowerWeight.DOWN, layer.down),
        )
        if bounds is None:
            return found
        return _Layer(
            BoundedProduct(found.qkv, bounds.qkv),
            BoundedProduct(found.output, bounds.output),
            BoundedProduct(found.up, bounds.up),
            BoundedProduct(found.down, bounds.down),
        )

    def _last_merger(self, merger: Merger | MeanMerger | GatedMerger) -> Callable[[Tensor], Tensor]:
        if isinstance(merger, Merger):
            return self._merger(None, merger)
        if isinstance(merger, GatedMerger):
            products = _GatedProducts(
                self._operators.product(None, TowerWeight.MERGING, merger.merging),
                self._operators.product(None, TowerWeight.MERGER_FIRST, merger.first),
                self._operators.product(None, TowerWeight.MERGER_UP, merger.up),
                self._operators.product(None, TowerWeight.MERGER_SECOND, merger.second),
            )
            return partial(self._gated_tokens, merger, products)
        product = self._operators.product(None, TowerWeight.MERGER_SECOND, merger.product)
        weight = self._ones[: self.config.hidden_size] if merger.token_norm is None else merger.token_norm.float() + 1
        return partial(self._averaged, merger, weight, product)

    def _averaged(self, merger: MeanMerger, weight: Tensor, product: Product, hidden: Tensor) -> Tensor:
        """Return [tokens, out_size] of hidden [patches, hidden]: of the mean of each token's patches."""
        size, patches = hidden.shape[1], hidden if merger.norm is None else self._normed(merger.norm, hidden)
        means = patches.view(-1, self.config.merge**2, size).float().mean(1).to(hidden.dtype)
        if self.config.scales_means and not self.config.norms_means:
            scaled = means.float() * size**0.5
            if merger.bias is not None and merger.factor is not None:
                scaled = (scaled - merger.bias) * merger.factor
            means = scaled.to(hidden.dtype)
        self._hand(TowerBorder.MERGER_READ, None, means)
        eps = self.config.norm_eps if self.config.merger_eps is None else self.config.merger_eps
        normed = self._hand(TowerBorder.MERGER_FED, None, rms_norm(means, weight, eps))
        return product(normed, None)

    def _merger(self, place: int | None, merger: Merger) -> Callable[[Tensor], Tensor]:
        """Return what makes tokens [tokens, out_size] of hidden [patches, hidden]."""
        of = self._operators.product
        first = of(place, TowerWeight.MERGER_FIRST, merger.first)
        second = of(place, TowerWeight.MERGER_SECOND, merger.second)
        merging = None if merger.merging is None else of(place, TowerWeight.MERGING, merger.merging)
        return partial(self._merged, place, merger, merging, (first, second))

    def _merged(
        self, place: int | None, merger: Merger, merging: Product | None, products: tuple[Product, Product],
        hidden: Tensor,
    ) -> Tensor:  # fmt: skip
        first, second = products
        size, eps = self.config.hidden_size * self.config.merge**2, self.config.merger_eps
        if merger.norm is None:
            tokens = hidden.view(-1, size)
        elif merger.norms_tokens:
            tokens = self._normed(merger.norm, hidden.view(-1, size), eps)
        else:
            tokens = self._normed(merger.norm, hidden, eps).view(-1, size)
        self._hand(TowerBorder.MERGER_READ, place, tokens)
        if merging is not None:
            tokens = self._hand(TowerBorder.MERGED, place, merging(tokens, None))
        fed = self._hand(TowerBorder.MERGER_FED, place, F.gelu(first(tokens, None)))
        return second(fed, None)

    def _gated_tokens(self, merger: GatedMerger, products: "_GatedProducts", hidden: Tensor) -> Tensor:
        """Return [tokens, out_size] of hidden [patches, hidden]."""
        tokens = self._normed(merger.norm, hidden).view(-1, hidden.shape[1] * self.config.merge**2)
        self._hand(TowerBorder.MERGER_READ, None, tokens)
        tokens = self._hand(TowerBorder.MERGED, None, products.merging(tokens, None))
        normed = self._normed(merger.inner_norm, products.first(tokens, None), self.config.merger_eps)
        read = self._hand(TowerBorder.MERGER_GATES_READ, None, F.gelu(normed))
        activation = self.config.activation
        assert isinstance(activation, Activation), "those of towers alone gate nothing"
        fed = self._hand(TowerBorder.MERGER_FED, None, gated(products.up(read, None), activation))
        return products.second(fed, None)

    def _hand(self, border: TowerBorder, index: int | None, value: Tensor) -> Tensor:
        """Hand out what is computed, to who observes; return it."""
        if self.observe is not None:
            self.observe(border, index, value)
        return value

    def _normed(self, norm: NormWeights, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config.norm_eps if eps is None else eps
        if norm.bias is None:
            return rms_norm(x, norm.weight, eps)
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)

    def _added(self, norm: NormWeights, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the residual plus x, and that sum, in the residual's or in other memory."""
        if norm.bias is None:
            return add_rms_norm(x, residual, norm.weight, self.config.norm_eps)
        residual = residual + x
        return self._normed(norm, residual), residual
