"""The tower: pixels of images to embeddings of a prompt's tokens. One class for the towers that are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
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


class Tower:
    """Computes images by the first path of each operator that can, without a plan; it keeps nothing of them.

    beat   called before each layer, of steps on a CPU: set by who must hear that a long one makes progress
    """

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        """`is_reproducible`: whether no image's bits may depend on the others: each is then computed by itself."""
        self.config = config
        self.weights = weights
        self.beat: Callable[[], None] | None = None
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
        geometry, device = Geometry.of(config, grids), self.device
        order = geometry.order.to(device)
        patches = torch.cat([self._patches(image) for image in images]).index_select(0, order)
        hidden = _product(patches, self.weights.patches)
        if self.weights.positions is not None:
            assert config.num_positions is not None, "weights are of the kind that the configuration says"
            positions = learned_positions(self.weights.positions, config.num_positions, grids)
            hidden = hidden + positions.index_select(0, order).to(hidden.dtype)
        turns = tuple([it.to(device) for it in rotation(config, geometry)])
        windows, whole = self._plan(geometry.windows), self._plan(geometry.images)
        added = []
        for index, layer in enumerate(self.weights.layers):
            if self.beat is not None:
                self.beat()
            is_full = config.window is None or index in config.full_layers
            hidden = self._layer(layer, hidden, turns, whole if is_full else windows)
            if index in config.deepstack:
                added.append(self._merged(self.weights.deepstack[config.deepstack.index(index)], hidden))
        found = torch.cat((self._merged(self.weights.merger, hidden), *added), dim=1)
        return found.index_select(0, geometry.tokens.to(device))

    def _patches(self, image: Image) -> Tensor:
        """Return an image's patches row by row, [patches, numbers], of each colour all frames, of each all rows."""
        (height, width), side, frames = image.grid, self.config.patch_size, self.config.num_frames
        numbers = ((image.pixels.to(self.device).float() - self._mean) / self._deviation).to(self.dtype)
        found = numbers.view(height, side, width, side, 3).permute(0, 2, 4, 1, 3)
        return found.unsqueeze(3).expand(-1, -1, -1, frames, -1, -1).reshape(height * width, -1)

    def _plan(self, lengths: tuple[int, ...]) -> AttentionPlan:
        """Plan attention of sequences of these lengths, whose tokens see each other both ways."""
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        return plan_varlen(ends, ends, max(lengths), max(lengths), causal=False)

    def _layer(self, layer: TowerLayer, hidden: Tensor, turns: tuple[Tensor, ...], plan: AttentionPlan) -> Tensor:
        shape = (hidden.shape[0], self.config.num_heads, self.config.head_dim)
        q, k, v = (it.view(shape) for it in _product(self._normed(layer.attention_norm, hidden), layer.qkv).chunk(3, 1))
        attended = plan.run(_turned(q, turns), _turned(k, turns), v.contiguous())
        hidden = hidden + _product(attended.view(hidden.shape), layer.output)
        up = _product(self._normed(layer.feed_forward_norm, hidden), layer.up)
        activation = self.config.activation
        fed = gated(up, activation) if self.config.is_gated else _ACTIVATIONS[activation](up)
        return hidden + _product(fed, layer.down)

    def _merged(self, merger: Merger, hidden: Tensor) -> Tensor:
        """Return [tokens, out_size] of hidden [patches, hidden]."""
        size = merger.first.weight.size[1]
        if merger.norms_tokens:
            tokens = self._normed(merger.norm, hidden.view(-1, size))
        else:
            tokens = self._normed(merger.norm, hidden).view(-1, size)
        return _product(F.gelu(_product(tokens, merger.first)), merger.second)

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
