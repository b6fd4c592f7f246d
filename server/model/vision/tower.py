"""The tower: pixels of images to embeddings of a prompt's tokens. One class for the towers that are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.functional import AttentionPlan, plan_varlen
from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.fused.norm import rms_norm
from kernels.linear.first_path import multiply
from qualification.model.tower import TowerConfig
from server.model.linear import Linear
from server.model.vision.geometry import Geometry, Grid, learned_positions, rotation
from server.model.vision.weights import Merger, NormWeights, TowerLayer, TowerWeights

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
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


class TowerBorder(Enum):
    """Places at which a tower hands out what it computes; patches stand in the order of its geometry."""

    PATCHED = "patches"
    ATTENTION_READ = "what attention reads"
    QUERIES = "queries"
    KEYS = "keys"
    VALUES = "values"
    ATTENDED = "attention"
    BEHIND_ATTENTION = "residual behind attention"
    FEED_FORWARD_READ = "what the feed-forward reads"
    FED = "activation"
    BEHIND_FEED_FORWARD = "residual behind the feed-forward"
    MERGER_READ = "what the merger reads"
    MERGER_FED = "activation of the merger"


# (border, layer; of a merger which one of those behind layers, None for the last one) -> takes the tensor
Observe = Callable[[TowerBorder, int | None, Tensor], None]


class Tower:
    """Computes images by the first path of each operator that can, without a plan; it keeps nothing of them.

    beat   called before each layer, of steps on a CPU: set by who must hear that a long one makes progress
    observe   is handed what is computed at each border, in the order in which it is: set by who checks it
    """

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        """`is_reproducible`: whether no image's bits may depend on the others: each is then computed by itself."""
        self.config = config
        self.weights = weights
        self.beat: Callable[[], None] | None = None
        self.observe: Observe | None = None
        self._is_reproducible = is_reproducible
        device = self.device
        self._mean = torch.tensor(pixels.mean, device=device) / pixels.factor
        self._deviation = torch.tensor(pixels.deviation, device=device) / pixels.factor

    @property
    def device(self) -> torch.device:
        return self.weights.merger.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.merger.norm.weight.dtype

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
        config, grids = self.config, [image.grid for image in images]
        geometry = Geometry.of(config, grids)
        order = self._sent(geometry.order)
        patches = torch.cat([self._patches(image) for image in images]).index_select(0, order)
        hidden = _product(patches, self.weights.patches)
        if self.weights.positions is not None:
            assert config.num_positions is not None, "weights are of the kind that the configuration says"
            positions = learned_positions(self.weights.positions, config.num_positions, grids)
            hidden = hidden + positions.index_select(0, order).to(hidden.dtype)
        self._hand(TowerBorder.PATCHED, None, hidden)
        turns = rotation(config, self._sent(geometry.rows), self._sent(geometry.columns))
        windows, whole = self._plan(geometry.windows), self._plan(geometry.images)
        added = []
        for index, layer in enumerate(self.weights.layers):
            if self.beat is not None:
                self.beat()
            is_full = config.window is None or index in config.full_layers
            hidden = self._layer(index, layer, hidden, turns, whole if is_full else windows)
            if index in config.deepstack:
                place = config.deepstack.index(index)
                added.append(self._merged(place, self.weights.deepstack[place], hidden))
        found = torch.cat((self._merged(None, self.weights.merger, hidden), *added), dim=1)
        return found.index_select(0, self._sent(geometry.tokens))

    def _sent(self, value: Tensor) -> Tensor:
        """Copy a tensor from the CPU, by way of pinned memory: another copy would wait for all launches before it."""
        return value if self.device.type == "cpu" else value.pin_memory().to(self.device, non_blocking=True)

    def _patches(self, image: Image) -> Tensor:
        """Return an image's patches row by row, [patches, numbers], of each colour all frames, of each all rows."""
        (height, width), side, frames = image.grid, self.config.patch_size, self.config.num_frames
        numbers = ((self._sent(image.pixels).float() - self._mean) / self._deviation).to(self.dtype)
        found = numbers.view(height, side, width, side, 3).permute(0, 2, 4, 1, 3)
        return found.unsqueeze(3).expand(-1, -1, -1, frames, -1, -1).reshape(height * width, -1)

    def _plan(self, lengths: tuple[int, ...]) -> AttentionPlan:
        """Plan attention of sequences of these lengths, whose tokens see each other both ways."""
        ends = self._sent(torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32))
        return plan_varlen(ends, ends, max(lengths), max(lengths), causal=False)

    def _layer(
        self, index: int, layer: TowerLayer, hidden: Tensor, turns: tuple[Tensor, ...], plan: AttentionPlan
    ) -> Tensor:
        shape = (hidden.shape[0], self.config.num_heads, self.config.head_dim)
        read = self._hand(TowerBorder.ATTENTION_READ, index, self._normed(layer.attention_norm, hidden))
        q, k, v = (it.view(shape) for it in _product(read, layer.qkv).chunk(3, 1))
        q = self._hand(TowerBorder.QUERIES, index, _turned(q, turns))
        k = self._hand(TowerBorder.KEYS, index, _turned(k, turns))
        v = self._hand(TowerBorder.VALUES, index, v.contiguous())
        attended = self._hand(TowerBorder.ATTENDED, index, plan.run(q, k, v).view(hidden.shape))
        hidden = self._hand(TowerBorder.BEHIND_ATTENTION, index, hidden + _product(attended, layer.output))
        read = self._hand(TowerBorder.FEED_FORWARD_READ, index, self._normed(layer.feed_forward_norm, hidden))
        up, activation = _product(read, layer.up), self.config.activation
        fed = gated(up, activation) if self.config.is_gated else _ACTIVATIONS[activation](up)
        self._hand(TowerBorder.FED, index, fed)
        return self._hand(TowerBorder.BEHIND_FEED_FORWARD, index, hidden + _product(fed, layer.down))

    def _merged(self, place: int | None, merger: Merger, hidden: Tensor) -> Tensor:
        """Return [tokens, out_size] of hidden [patches, hidden]."""
        size = merger.first.weight.size[1]
        if merger.norms_tokens:
            tokens = self._normed(merger.norm, hidden.view(-1, size))
        else:
            tokens = self._normed(merger.norm, hidden).view(-1, size)
        self._hand(TowerBorder.MERGER_READ, place, tokens)
        fed = self._hand(TowerBorder.MERGER_FED, place, F.gelu(_product(tokens, merger.first)))
        return _product(fed, merger.second)

    def _hand(self, border: TowerBorder, index: int | None, value: Tensor) -> Tensor:
        """Hand out what is computed, to who observes; return it."""
        if self.observe is not None:
            self.observe(border, index, value)
        return value

    def _normed(self, norm: NormWeights, x: Tensor) -> Tensor:
        if norm.bias is None:
            return rms_norm(x, norm.weight, self.config.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self.config.norm_eps)


def _product(x: Tensor, linear: Linear) -> Tensor:
    return multiply(x, linear.weight, linear.bias)


def _turned(x: Tensor, turns: tuple[Tensor, ...]) -> Tensor:
    """Rotate the two halves of each head of x [patches, heads, head_dim] against each other, in fp32."""
    cosines, sines = turns
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)
