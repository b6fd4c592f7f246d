"""A model's processor of images, as the files of its folder describe it.

config.json                model_type, the ids of the tokens, the tower's patches
preprocessor_config.json   sizes, values; older
processor_config.json      the same under `image_processor`, which goes first; image_seq_length; names of tokens
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qualification.model.families.towers import GEMMA_4_TOKENS
from qualification.model.fields import Fields, ModelConfigError
from server.errors import ModelError
from server.model.images.sizes import Enlarging, FixedSize, LargestSides, PixelRange, SizeRule, Tiles, TokenBudget
from server.model.load.folder import CONFIG_FILE
from server.model.load.json_file import read_object

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"


class ImageFamily(Enum):
    """Processors, by the models that brought them."""

    QWEN2_5_VL = "qwen2_5_vl"
    QWEN3_VL = "qwen3_vl"
    GEMMA3 = "gemma3"
    GLM4V = "glm4v"
    INTERNVL = "internvl"
    PADDLEOCR_VL = "paddleocr_vl"
    PIXTRAL = "pixtral"
    GEMMA4 = "gemma4"


class Resampling(Enum):
    """Filters of a resizing, by the numbers that files have for them, which are Pillow's."""

    BILINEAR = 2
    BICUBIC = 3


_FAMILIES = {
    "qwen2_vl": ImageFamily.QWEN2_5_VL,
    "qwen2_5_vl": ImageFamily.QWEN2_5_VL,
    "qwen3_vl": ImageFamily.QWEN3_VL,
    "qwen3_vl_moe": ImageFamily.QWEN3_VL,
    "qwen3_5": ImageFamily.QWEN3_VL,
    "qwen3_5_moe": ImageFamily.QWEN3_VL,
    "gemma3": ImageFamily.GEMMA3,
    "glm4v": ImageFamily.GLM4V,
    "glm4v_moe": ImageFamily.GLM4V,
    "glm46v": ImageFamily.GLM4V,
    "glm_ocr": ImageFamily.GLM4V,
    "internvl": ImageFamily.INTERNVL,
    "paddleocr_vl": ImageFamily.PADDLEOCR_VL,
    "llava": ImageFamily.PIXTRAL,
    "mistral3": ImageFamily.PIXTRAL,
    "gemma4": ImageFamily.GEMMA4,
    "gemma4_unified": ImageFamily.GEMMA4,
}
_GLM_IDS = {"glm4v": 151_343, "glm4v_moe": 151_363, "glm46v": 151_343, "glm_ocr": 59_280}
_MOST_TILES = 48  # of an image: with their copy they are no more rows of patches than a tower takes
_OF_NORMALIZING = ("do_normalize", "image_mean", "image_std")
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_START_OF_INTERN, _END_OF_INTERN = "<img>", "</img>"
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens that stand for an image in a prompt.

    template_id  what a chat template writes for an image
    image_id     placeholder of each embedding of the tower
    before, after   texts that the processor puts around an image's tokens; they are tokenized with what stands beside
    start_id, end_id   tokens of the image's borders, which the processor writes between those texts and the image
    start, end   the same by their names; "": there is none
    between      name of the token behind each row of an image's tokens, the last one's apart; "": there is none
    """

    template_id: int
    image_id: int
    before: str = ""
    after: str = ""
    start_id: int | None = None
    end_id: int | None = None
    between: str = ""
    start: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Sizes, values and tokens of a model's images.

    sizes        after resizing
    patch_size   pixels of a patch's side
    merge_size   patches of a token's side, which the model merges
    temporal_patch_size   times that a still image is repeated in a patch
    rescale_factor, mean, std   a tower reads (value * rescale_factor - mean) / std of each channel: red, green, blue
    """

    family: ImageFamily
    sizes: SizeRule
    resampling: Resampling
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: ImageTokens

    @classmethod
    def load(cls, folder: Path) -> "ImageSettings | None":
        """Read a model's folder; None for a model without images, or of no processor that is known.

        Raises ModelError for files that are wrong, and for what this server's processor does not do.
        """
        path = folder / CONFIG_FILE
        config = read_object(path)
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None or not isinstance(config.get("vision_config"), dict):
            return None
        whole = _object(folder / PROCESSOR_FILE)
        nested = whole.get("image_processor")
        file = PROCESSOR_FILE if isinstance(nested, dict) else PREPROCESSOR_FILE
        given = nested if isinstance(nested, dict) else _object(folder / PREPROCESSOR_FILE)
        if not given:
            raise ModelError(f"{folder}: needs {PREPROCESSOR_FILE}, which says how images are resized")
        try:
            fields = Fields(given, str(folder / file))
            return _READERS[family](
                family, fields, Fields(config, str(path)), Fields(whole, str(folder / PROCESSOR_FILE))
            )
        except ModelConfigError as error:
            raise ModelError(str(error)) from error

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return frames, rows and columns of patches of an image of this size after resizing."""
        return 1, height // self.patch_size, width // self.patch_size

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an image, those between its rows apart."""
        return self.sizes.most_pixels // (self.patch_size * self.merge_size) ** 2

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the tokens that stand for an image in a prompt, in place of one `image_id`."""
        frames, rows, columns = grid
        num_between = rows // self.merge_size - 1 if self.tokens.between else 0
        return frames * rows * columns // self.merge_size**2 + num_between


def _object(path: Path) -> Mapping[str, object]:
    return read_object(path) if path.is_file() else {}


def _values(
    fields: Fields, mean: list[float], std: list[float], resampling: Resampling
) -> tuple[Resampling, float, tuple[float, ...], tuple[float, ...]]:
    """Return filter, factor, mean and deviation, with what the family's class has where the file says nothing."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if name in fields.names and fields.given(name) is not True:  # of null transformers does not do it, either
            fields.refuse(name, "true: images are resized, rescaled and normalised")
    if fields.given("do_convert_rgb") is False:
        fields.refuse("do_convert_rgb", "true: images have three channels")
    if fields.flag("do_center_crop", False):
        fields.refuse("do_center_crop", "false: images are not cropped")
    number = fields.given("resample") if "resample" in fields.names else resampling.value
    if type(number) is not int or number not in [it.value for it in Resampling]:
        fields.refuse("resample", "2 (bilinear) or 3 (bicubic)")
    given = fields.or_else(image_mean=mean, image_std=std)
    factor = fields.number("rescale_factor", 1 / 255)
    return Resampling(number), factor, given.numbers("image_mean", 3), given.numbers("image_std", 3)


def _qwen(family: ImageFamily, fields: Fields, config: Fields, _whole: Fields) -> ImageSettings:
    values = _values(fields, _CLIP_MEAN, _CLIP_STD, Resampling.BICUBIC)
    patch, merge = fields.integer("patch_size", 14), fields.integer("merge_size", 2)
    size = fields.section("size") or Fields({}, fields.source)
    least = fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56))
    most = fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280))
    image_id = config.integer("image_token_id", 151_655)
    tokens = ImageTokens(image_id, image_id)
    temporal = fields.integer("temporal_patch_size", 2)
    return ImageSettings(
        family, PixelRange(patch * merge, least, most), values[0], patch, merge, temporal, *values[1:], tokens
    )


def _glm(family: ImageFamily, fields: Fields, config: Fields, _whole: Fields) -> ImageSettings:
    values = _values(fields, _CLIP_MEAN, _CLIP_STD, Resampling.BICUBIC)
    patch, merge = fields.integer("patch_size", 14), fields.integer("merge_size", 2)
    temporal = fields.integer("temporal_patch_size", 2)
    size = fields.section("size") or Fields({}, fields.source)
    bounds = []  # of the pixels of an image, which a file counts once for each time that it is given to the tower
    for name, missing in (("shortest_edge", 112 * 112), ("longest_edge", 28 * 28 * 15_000)):
        bound = size.integer(name, missing)
        if bound % temporal:
            size.refuse(name, f"a multiple of temporal_patch_size ({temporal})")
        bounds.append(bound // temporal)
    image_id = config.integer("image_token_id", _GLM_IDS[str(config.given("model_type"))])
    tokens, sizes = ImageTokens(image_id, image_id), PixelRange(patch * merge, bounds[0], bounds[1], Enlarging.TOGETHER)
    return ImageSettings(family, sizes, values[0], patch, merge, temporal, *values[1:], tokens)


def _paddle(family: ImageFamily, fields: Fields, config: Fields, _whole: Fields) -> ImageSettings:
    values = _values(fields, _CLIP_MEAN, _CLIP_STD, Resampling.BICUBIC)
    patch, merge = fields.integer("patch_size", 14), fields.integer("merge_size", 2)
    if fields.integer("temporal_patch_size", 1) != 1:
        fields.refuse("temporal_patch_size", "1: its tower reads one frame")
    size = fields.section("size") or Fields({}, fields.source)
    # Published files have them twice, in `size` by the names that they have beside it.
    least, most = (
        fields.integer(name, size.integer(edge, size.integer(name, missing)))
        for name, edge, missing in (("min_pixels", "shortest_edge", 384**2), ("max_pixels", "longest_edge", 1536**2))
    )
    image_id = config.integer("image_token_id", 100_295)
    tokens, sizes = ImageTokens(image_id, image_id), PixelRange(patch * merge, least, most, Enlarging.IN_TURN)
    return ImageSettings(family, sizes, values[0], patch, merge, 1, *values[1:], tokens)


def _gemma(family: ImageFamily, fields: Fields, config: Fields, whole: Fields) -> ImageSettings:
    values = _values(fields, [0.5] * 3, [0.5] * 3, Resampling.BILINEAR)
    if fields.given("do_pan_and_scan"):
        fields.refuse("do_pan_and_scan", "false: images are not cut into pieces")
    size = fields.section("size") or Fields({"height": 224, "width": 224}, fields.source)
    height, width = size.integer("height"), size.integer("width")
    vision = config.section("vision_config") or Fields({}, config.source)
    patch, num_tokens = vision.integer("patch_size", 14), whole.integer("image_seq_length", 256)
    merge = math.isqrt((height // patch) * (width // patch) // num_tokens)
    if height % patch or width % patch or merge**2 * num_tokens != (height // patch) * (width // patch):
        whole.refuse("image_seq_length", f"a number of squares of patches in an image of {width} x {height} pixels")
    start = config.integer("boi_token_id", config.integer("boi_token_index", 255_999))
    end = config.integer("eoi_token_id", config.integer("eoi_token_index", 256_000))
    image_id = config.integer("image_token_id", config.integer("image_token_index", 262_144))
    tokens = ImageTokens(start, image_id, "\n\n", "\n\n", start, end)
    return ImageSettings(family, FixedSize(height, width), values[0], patch, merge, 1, *values[1:], tokens)


def _pixtral(family: ImageFamily, fields: Fields, config: Fields, whole: Fields) -> ImageSettings:
    values = _values(fields, _CLIP_MEAN, _CLIP_STD, Resampling.BICUBIC)
    vision = config.section("vision_config") or Fields({}, config.source)
    is_llava = config.given("model_type") == "llava"  # whose class merges no patches
    patch = vision.integers("patch_size", 2, 16)[0]
    merge = 1 if is_llava else config.integer("spatial_merge_size", 2)
    # The processor's own, which are not the ones of its images' file: tokens are counted by these.
    for name, due in (("patch_size", patch), ("spatial_merge_size", merge)):
        if whole.integer(name, due) != due:
            whole.refuse(name, f"{due}, as the tower has it")
    size = fields.section("size") or Fields({"longest_edge": 1024}, fields.source)
    longest = size.integer_or_none("longest_edge", None)
    height, width = (longest or size.integer(name) for name in ("height", "width"))
    image_id = config.integer("image_token_id", config.integer("image_token_index", 32_000 if is_llava else 10))
    between, end = (
        str(whole.given(f"image_{name}_token") or missing) for name, missing in (("break", _BREAK), ("end", _END))
    )
    tokens = ImageTokens(image_id, image_id, after=end, between=between)
    sizes = LargestSides(patch * merge, height, width)
    return ImageSettings(family, sizes, values[0], patch, merge, 1, *values[1:], tokens)


def _internvl(family: ImageFamily, fields: Fields, config: Fields, whole: Fields) -> ImageSettings:
    values = _values(fields, _CLIP_MEAN, _CLIP_STD, Resampling.BICUBIC)
    vision = config.section("vision_config") or Fields({}, config.source)
    patch, image = vision.integers("patch_size", 2, 14)[0], vision.integers("image_size", 2, 448)[0]
    size = fields.section("size") or Fields({"height": 384, "width": 384}, fields.source)
    for name in ("height", "width"):
        if size.integer(name) != image:
            size.refuse(name, f"{image}, as the tower has it")
    merge = round(1 / config.number("downsample_ratio", 0.5))
    if whole.integer("image_seq_length", 256) != (due := (image // patch // merge) ** 2):
        whole.refuse("image_seq_length", f"{due}, the tokens of a tile")
    least, most = fields.integer("min_patches", 1), fields.integer("max_patches", 12, most=_MOST_TILES)
    if least > most:
        fields.refuse("min_patches", f"at most max_patches ({most})")
    image_id = config.integer("image_token_id", 151_667)
    tokens = ImageTokens(image_id, image_id, start=_START_OF_INTERN, end=_END_OF_INTERN)
    return ImageSettings(family, Tiles(image, least, most), values[0], patch, merge, 1, *values[1:], tokens)


def _gemma_4(family: ImageFamily, fields: Fields, config: Fields, _whole: Fields) -> ImageSettings:
    if fields.flag("do_normalize", False):
        fields.refuse("do_normalize", "false: the model's class norms the pixels")
    is_unified = config.given("model_type") == "gemma4_unified"  # whose tower reads squares of patches as they are
    mean, deviation = ([0.0] * 3, [1.0] * 3) if is_unified else ([0.5] * 3, [0.5] * 3)
    plain = {name: fields.given(name) for name in fields.names if name not in _OF_NORMALIZING}
    values = _values(Fields(plain, fields.source), mean, deviation, Resampling.BICUBIC)
    patch, merge = fields.integer("patch_size", 16), fields.integer("pooling_kernel_size", 3)
    vision = config.section("vision_config") or Fields({}, config.source)
    for name, given, missing in (("patch_size", patch, 16), ("pooling_kernel_size", merge, 3)):
        if (due := vision.integer(name, missing)) != given:
            fields.refuse(name, f"{due}, as the tower has it")
    image_id = config.integer("image_token_id", 258_880)
    start, end = config.integer("boi_token_id", 255_999), config.integer("eoi_token_id", 258_882)
    tokens = ImageTokens(image_id, image_id, start_id=start, end_id=end)
    budget = fields.integer("max_soft_tokens", 280)
    if budget > GEMMA_4_TOKENS:
        fields.refuse("max_soft_tokens", f"{GEMMA_4_TOKENS} at most")
    sizes = TokenBudget(patch * merge, budget)
    if is_unified:
        patch, merge = patch * merge, 1
    return ImageSettings(family, sizes, values[0], patch, merge, 1, *values[1:], tokens)


_READERS = {
    ImageFamily.GEMMA4: _gemma_4,
    ImageFamily.PIXTRAL: _pixtral,
    ImageFamily.QWEN2_5_VL: _qwen,
    ImageFamily.QWEN3_VL: _qwen,
    ImageFamily.GLM4V: _glm,
    ImageFamily.GEMMA3: _gemma,
    ImageFamily.INTERNVL: _internvl,
    ImageFamily.PADDLEOCR_VL: _paddle,
}
