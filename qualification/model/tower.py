"""The tower of a model that sees images: what makes embeddings of an image's patches. Torch-free."""

from dataclasses import dataclass
from enum import Enum

from kernels.fused.activation_kind import Activation

MOST_GRID = 2048  # patches of a side
_OF_ALL_PARTS = "model."  # before a tower's names, where a class has one model for all parts


class Interpolation(Enum):
    """Way in which an image's patches find learned positions between the points of a square."""

    CORNERS = "linear, corners on corners"
    LINEAR = "linear, between the middles of patches"  # beyond the outermost ones it repeats them
    CUBIC = "a cubic convolution, between the middles of patches"


class TowerActivation(Enum):
    """Functions of a feed-forward that towers alone have, beside those of kernels; named as in config.json."""

    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x)


@dataclass(frozen=True, slots=True)
class TowerNames:
    """The names of a tower's tensors in a checkpoint; empty where it has no such tensor.

    parts           beginnings of all of them, before which `model.` may stand
    patches         the product that reads pixels; patches_norm: of its results, positions: added to them
    pixels_norm, product_norm   norms of what that product reads, and of what it makes before positions are added
    layer           one of the layers, {} its number; within it: the norms, and the products, of which those that are
                    one in memory are one or several here
    merger          what makes tokens of the last layer's patches; deepstack: of another layer's, {} which of them
    merger_of_whole    what the merger is called behind `model.`, where that is another name
    merger_norm, merging, first, merger_up, second    within a merger
    downsample      the product that makes tokens of patches, before that merger
    inner           what may stand behind the first of `parts`, where a class has a model within its tower
    last_norm       of patches behind the last layer, where they are not the merger's
    not_read        beginnings of names that nothing of the tower reads
    q_norm, k_norm, after_attention, after_feed_forward    norms of a layer, where there are such
    class_token     of the row that is no patch
    attention_scale, feed_forward_scale    what multiplies the results of a layer's two parts
    mean_bias, mean_factor    what is taken from the mean of merged patches, and multiplies it
    """

    parts: tuple[str, ...]
    patches: str
    merger: str
    second: str
    layer: str = ""
    attention_norm: str = ""
    qkv: tuple[str, ...] = ()
    output: str = ""
    feed_forward_norm: str = ""
    up: tuple[str, ...] = ()
    down: str = ""
    merger_norm: str = ""
    first: str = ""
    merging: str = ""
    patches_norm: str = ""
    positions: str = ""
    pixels_norm: str = ""
    product_norm: str = ""
    deepstack: str = ""
    inner: str = ""
    last_norm: str = ""
    downsample: str = ""
    merger_up: tuple[str, ...] = ()
    q_norm: str = ""
    k_norm: str = ""
    after_attention: str = ""
    after_feed_forward: str = ""
    class_token: str = ""
    attention_scale: str = ""
    feed_forward_scale: str = ""
    mean_bias: str = ""
    mean_factor: str = ""
    not_read: tuple[str, ...] = ()
    merger_of_whole: str = ""

    def own(self, name: str) -> str | None:
        """Return a checkpoint's name of a tensor as it is named here; None for one that the tower does not read."""
        short = name.removeprefix(_OF_ALL_PARTS)
        tower = self.parts[0]
        if self.inner and short.startswith(tower):
            short = tower + short.removeprefix(tower).removeprefix(self.inner)
        if self.merger_of_whole and name.startswith(_OF_ALL_PARTS + self.merger_of_whole):
            short = self.merger + short.removeprefix(self.merger_of_whole)
        return short if short.startswith(self.parts) and not short.startswith(self.not_read) else None

    def written(self, name: str) -> tuple[str, ...]:
        """Return a checkpoint's names of a tensor as it is named here: one for each way in which all may be written."""
        tower = self.parts[0]
        is_within = bool(self.inner) and name.startswith(tower)
        names = name, tower + self.inner + name.removeprefix(tower) if is_within else name
        if self.merger_of_whole and name.startswith(self.merger):
            of_whole = self.merger_of_whole + name.removeprefix(self.merger)
            return (*names, *[_OF_ALL_PARTS + of_whole] * 2)
        return tuple(whole + it for whole in ("", _OF_ALL_PARTS) for it in names)

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that has a tensor; None for one outside of all."""
        before = self.layer.removesuffix("{}")
        number = name.removeprefix(before).partition(".")[0]
        return int(number) if name.startswith(before) and number.isdecimal() else None


class Merging(Enum):
    """Way in which a token is made of its patches."""

    BESIDE = "beside"  # they stand beside each other, and are multiplied twice
    PRODUCT = "product"  # one before these two makes one patch's numbers of theirs, read number by number
    MEAN = "mean"  # their mean is normed, and multiplied once
    # One product makes a token of their numbers, read number by number; then one behind which a LayerNorm and a GELU
    # stand, and a gated feed-forward.
    GATED = "gated"


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A transformer over an image's patches, whose results are merged to embeddings of a prompt's tokens.

    num_layers, hidden_size, num_heads, width, activation   of its layers; `width` of the feed-forward
    names           of its tensors
    is_gated        whether the feed-forward is gated; else it has one product in
    has_rms_norms   whether norms are RMSNorms; else they are LayerNorms with biases
    has_biases      whether the products of layers have biases; has_qkv_bias: that of queries, keys and values, None: as
                    the others; has_patch_bias: the one that reads pixels; merger_has_biases: those of a merger
    patch_size      pixels of a side of a patch
    num_frames      how often a still image is given, one beside the other: the first product reads several frames
    merge           patches of a side that become one token
    out_size        numbers of a token: the text's hidden size
    window          tokens of a side of a window, whose patches see each other alone in all layers but `full_layers`;
                    None: all layers see the whole image
    num_positions   of a side of the square of learned positions, which are interpolated; None: there are none
    interpolation   of these
    deepstack       layers whose results are merged too: each is added to the residual behind a layer of the text,
                    those of the first one behind the first
    rope_theta      of the rotation in two dims, by the row and the column of a patch; None: nothing is rotated
    alternates_rates  whether rows and columns take the rates of a head in turns; else both have the same
    norms_patches   whether patches are normed before the first layer
    norms_pixels    whether a patch's pixels are normed before they are multiplied
    norms_product   whether what is made of them is normed before positions are added
    norms_last      whether patches are normed behind the last layer, before the merger norms them
    places_first    whether a checkpoint has the two tables of `num_places` side by side, [places, 2, hidden]
    merging         how a token is made of its patches
    merger_eps      of the merger's norm; None: as `norm_eps`
    merger_width    of the gated feed-forward within a merger; of one that is not gated the numbers between its two
                    products, 0: as many as the first one reads
    merger_has_norm    whether a merger norms what its first product reads
    merger_norms_tokens    whether the last merger norms a token's patches together, as those behind layers do
    merger_has_layer_norm  whether its norm is a LayerNorm where those of layers are not
    has_line_ends   whether a token of the text stands behind each row of an image's tokens, the last one's apart
    image_side      patches of each side of every image; None: images may have any
    is_tiled        whether an image is a column of such squares, its tiles, each of which is a window
    has_class_token whether a row of its own, which is no patch, stands before the patches of each tile, and is dropped
                    behind the last layer; the first learned position is its
    most_tokens     of one image; None: as many as its sides allow
    num_places      rows of each of two tables of learned positions, by the column and by the row; None: there are none
    norms_heads     whether each head's queries and keys are normed before they are turned
    norms_heads_together   whether it is all heads' queries that are normed together, and all keys
    norms_values    whether its values are too, without a weight; scores are then not scaled
    splits_heads    whether each half of a head is turned by itself, the first by the column, the other by the row
    norms_after     whether what attention and the feed-forward make is normed before it is added
    scales_residuals   whether each number of what attention and the feed-forward make is multiplied before it is added
    has_bounds      whether a checkpoint has bounds of what each product of a layer reads and makes
    reads_colours_last  whether the first product reads the colours of a pixel beside each other
    norms_means     whether patches are normed before their mean is taken, and its own norm has a weight; else that has
                    none
    scales_means    whether the mean is multiplied by sqrt(hidden_size) where its norm has no weight
    standardizes    whether that product is standardized before it is normed
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    width: int
    activation: Activation | TowerActivation
    is_gated: bool
    patch_size: int
    num_frames: int
    merge: int
    out_size: int
    names: TowerNames
    has_biases: bool = True
    has_qkv_bias: bool | None = None
    has_patch_bias: bool = True
    has_rms_norms: bool = False
    merger_has_biases: bool = True
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    num_positions: int | None = None
    interpolation: Interpolation = Interpolation.CORNERS
    deepstack: tuple[int, ...] = ()
    rope_theta: float | None = 10_000.0
    norm_eps: float = 1e-6
    alternates_rates: bool = False
    norms_patches: bool = False
    norms_pixels: bool = False
    norms_product: bool = False
    norms_last: bool = False
    places_first: bool = False
    merging: Merging = Merging.BESIDE
    merger_eps: float | None = None
    merger_width: int = 0
    merger_has_norm: bool = True
    merger_norms_tokens: bool = False
    merger_has_layer_norm: bool = False
    has_line_ends: bool = False
    image_side: int | None = None
    is_tiled: bool = False
    has_class_token: bool = False
    most_tokens: int | None = None
    num_places: int | None = None
    norms_heads: bool = False
    norms_heads_together: bool = False
    norms_values: bool = False
    splits_heads: bool = False
    norms_after: bool = False
    scales_residuals: bool = False
    has_bounds: bool = False
    reads_colours_last: bool = False
    norms_means: bool = False
    scales_means: bool = True
    standardizes: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def scale(self) -> float:
        """Return the factor of the scores of attention."""
        return 1.0 if self.norms_values else self.head_dim**-0.5

    @property
    def padded_width(self) -> int:
        """The feed-forward's width as it is computed: rows of whole 16 bytes, the numbers beyond `width` zeros.

        Qwen 2.5 VL's 3420 are none: the product of such rows took 245 of a layer's 610 us (5476 patches, H200).
        """
        return -(-self.width // 8) * 8

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch that the first product reads."""
        return 3 * self.num_frames * self.patch_size**2

    @property
    def merger_products(self) -> tuple[tuple[int, int, bool], ...]:
        """The numbers that each product of a merger reads and makes, and whether it has a bias, in order."""
        size, out, has_bias = self.hidden_size, self.out_size, self.merger_has_biases
        merged = size * self.merge**2
        match self.merging:
            case Merging.MEAN:
                return ((size, out, has_bias),)
            case Merging.PRODUCT:
                return (merged, size, False), (size, out, has_bias), (out, out, has_bias)
            case Merging.GATED:
                width = self.merger_width
                return (merged, out, True), (out, out, has_bias), (out, 2 * width, has_bias), (width, out, has_bias)
            case Merging.BESIDE:
                width = self.merger_width or merged
                return (merged, width, has_bias), (width, out, has_bias)

    @property
    def tokens_of_each(self) -> int | None:
        """Return the tokens of every image; None where images may have any size."""
        return None if self.image_side is None or self.is_tiled else (self.image_side // self.merge) ** 2

    def most_patches(self, num_tokens: int) -> int:
        """Return the patches of the largest image of so many tokens at most."""
        most = (num_tokens if self.most_tokens is None else min(num_tokens, self.most_tokens)) * self.merge**2
        if self.image_side is None:
            return most
        of_square = self.image_side**2
        return max(1, most // of_square) * of_square if self.is_tiled else min(most, of_square)

    @property
    def least_tokens(self) -> int:
        """Return the tokens of the smallest image, of those that may have several sizes."""
        return (self.image_side // self.merge) ** 2 if self.is_tiled and self.image_side is not None else 1

    def num_windows(self, num_patches: int) -> int:
        """Return the windows of an image of tiles."""
        assert self.image_side is not None, "tiles have a size"
        return num_patches // self.image_side**2

    @property
    def window_rows(self) -> int | None:
        """Return the rows that attend to each other in the largest window; None without windows."""
        return None if self.window is None else (self.window * self.merge) ** 2 + self.has_class_token

    @property
    def row_size(self) -> int:
        """Numbers of a token: its embedding, and what is added behind layers of the text."""
        return self.out_size * (1 + len(self.deepstack))

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the tokens of an image of so many (frames, height, width) patches, with the ends of its rows."""
        frames, height, width = (grid[0], *(side // self.merge for side in grid[1:]))
        return frames * height * width + (height - 1 if self.has_line_ends else 0)

    def refusal(self, grid: tuple[int, int, int], num_bytes: int, num_tokens: int) -> str | None:
        """Return why an image of so many patches, bytes of pixels and tokens of a prompt is none; None if it is one."""
        frames, height, width = grid
        if frames != 1:
            return f"an image has {frames} frames, and 1 is what can be computed"
        most = MOST_GRID if self.num_places is None else min(MOST_GRID, self.num_places)
        if not all(0 < side <= most and side % self.merge == 0 for side in (height, width)):
            sides = f"a multiple of {self.merge} and at most {most}"
            return f"an image has {height} x {width} patches: each side must be {sides}"
        if self.is_tiled and self.image_side is not None:
            if width != self.image_side or height % self.image_side:
                sides = f"{self.image_side} columns and a multiple of as many rows"
                return f"an image has {height} x {width} patches: this model's have {sides}"
        elif self.image_side not in (None, height) or self.image_side not in (None, width):
            return f"an image has {height} x {width} patches: this model's have {self.image_side} a side"
        if num_bytes != (due := 3 * height * width * self.patch_size**2):
            return f"an image of {height} x {width} patches has {num_bytes} bytes, and not {due}"
        if num_tokens != (due := self.num_tokens(grid)):
            return f"an image of {height} x {width} patches has {num_tokens} tokens of the prompt, and not {due}"
        if self.most_tokens is not None and num_tokens > self.most_tokens:
            return f"an image has {num_tokens} tokens, and {self.most_tokens} is the most of this model"
        return None
