"""Images as processors resize them, beside transformers' own."""

import copy
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as paddle_resize
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from server.cli.main import images_of
from server.errors import ModelError, SettingsError
from server.model.images.decode import ImageError, decode
from server.model.images.process import process
from server.model.images.settings import ImageSettings
from server.model.images.sizes import Enlarging, PixelRange, SizeError, Tiles, TokenBudget
from server.settings import Settings
from support.images.processor_files import (
    GEMMA3,
    GEMMA4,
    GLM4V,
    INTERNVL,
    PADDLEOCR_VL,
    PIXTRAL,
    QWEN2_5_VL,
    QWEN3_VL,
    write,
)

MAX_PIXELS = 2**22


def drawn(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), np.uint8)
    return Image.fromarray(numbers[:, :, 0] if mode == "L" else numbers)


def of_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def settings_of(folder: Path, files: dict[str, dict[str, Any]]) -> ImageSettings:
    found = ImageSettings.load(write(folder, files))
    assert found is not None
    return found


@pytest.mark.parametrize("enlarging", Enlarging)
def test_sizes_are_those_of_transformers(enlarging: Enlarging) -> None:
    draw = random.Random(0)
    for _ in range(20_000):
        factor = draw.choice([28, 32])
        least = draw.choice([56 * 56, 65536, 1])
        most = max(least, draw.choice([28 * 28 * 1280, 12845056, 50_000]))
        # Also halves of a multiple, which Python rounds to the even one.
        height, width = (draw.choice([draw.randint(1, 3000), factor * draw.randint(0, 40) + factor // 2]) for _ in "hw")
        rule = PixelRange(factor, least, most, enlarging)
        try:
            if enlarging is Enlarging.TOGETHER:  # an image counts as two frames, by twice its pixels
                wanted = glm_resize(2, height, width, 2, factor, 2 * least, 2 * most)
            elif enlarging is Enlarging.IN_TURN:
                wanted = paddle_resize(height, width, factor, least, most)
            else:
                wanted = smart_resize(height, width, factor, least, most)
        except ValueError:
            with pytest.raises(SizeError, match="at most 200 times"):
                rule.resized(height, width)
        else:
            assert rule.resized(height, width) == wanted


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (QWEN3_VL, {"do_rescale": None}, "do_rescale must be true: .*found None"),
        (INTERNVL, {"do_normalize": None}, "do_normalize must be true: .*found None"),
        (PIXTRAL, {"do_resize": None}, "do_resize must be true: .*found None"),
        (QWEN2_5_VL, {"resample": None}, "resample must be 2 .* found None"),
        (GEMMA3, {"size": {"shortest_edge": 896}}, "size: height must be"),
    ],
)
def test_what_transformers_does_otherwise_is_refused_by_name(
    tmp_path: Path, files: dict[str, dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    """Transformers takes no default for null, and makes no squares by one side."""
    files = copy.deepcopy(files)
    files["preprocessor_config.json"] |= changes
    with pytest.raises(ModelError, match=message):
        settings_of(tmp_path, files)


@pytest.mark.parametrize(
    ("files", "processor", "bounds"),
    [
        (QWEN2_5_VL, Qwen2VLImageProcessorPil, {"min_pixels": 5000, "max_pixels": 60_000}),
        (QWEN3_VL, Qwen2VLImageProcessorPil, {"min_pixels": 5000, "max_pixels": 60_000}),
        (GLM4V, Glm4vImageProcessorPil, {"size": {"shortest_edge": 10_000, "longest_edge": 120_000}}),
        (PADDLEOCR_VL, PaddleOCRVLImageProcessorPil, {"min_pixels": 5000, "max_pixels": 60_000}),
    ],
    ids=["qwen2.5-vl", "qwen3-vl", "glm4v", "paddleocr-vl"],
)
def test_qwen_pixels_and_tokens_are_those_of_transformers(
    tmp_path: Path, files: dict[str, dict[str, Any]], processor: type, bounds: dict[str, Any]
) -> None:
    files = copy.deepcopy(files)
    files["preprocessor_config.json"] |= bounds
    settings = settings_of(tmp_path, files)
    own = files["preprocessor_config.json"] | {"do_rescale": False, "do_normalize": False}
    reference = processor(**own)
    draw = random.Random(1)
    for seed in range(24):
        mode = draw.choice(["RGB", "RGB", "L", "RGBA"])
        image = drawn(mode, draw.randint(3, 400), draw.randint(3, 400), seed)
        found = process(decode(of_file(image), MAX_PIXELS), settings, settings.sizes)
        wanted = reference(images=[image], return_tensors="np")
        assert found.grid == tuple(wanted["image_grid_thw"][0])
        patch, merge, (_, rows, columns) = settings.patch_size, settings.merge_size, found.grid
        pixels = np.frombuffer(found.pixels, np.uint8).reshape(
            rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        order = (0, 1, 3, 4) if processor is PaddleOCRVLImageProcessorPil else (0, 3, 1, 4)  # row by row, or by token
        patches = pixels.transpose(*order, 6, 2, 5).reshape(rows * columns, 3, 1, patch, patch)
        twice = np.broadcast_to(patches, (rows * columns, 3, settings.temporal_patch_size, patch, patch))
        assert (twice.reshape(wanted["pixel_values"].shape) == wanted["pixel_values"]).all()
        assert found.num_tokens == wanted["image_grid_thw"][0].prod() // merge**2


def test_gemma_pixels_and_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    files = copy.deepcopy(GEMMA3)
    files["preprocessor_config.json"]["size"] = {"height": 224, "width": 224}
    files["processor_config.json"]["image_seq_length"] = 16
    settings = settings_of(tmp_path, files)
    own = files["preprocessor_config.json"] | {"do_rescale": False, "do_normalize": False, "do_convert_rgb": True}
    reference = Gemma3ImageProcessorPil(**own)
    for seed, (width, height) in enumerate([(1, 900), (300, 299), (224, 224), (17, 5)]):
        image = drawn("RGB", width, height, seed)
        found = process(decode(of_file(image), MAX_PIXELS), settings, settings.sizes)
        wanted = np.asarray(reference(images=[image], return_tensors="np")["pixel_values"][0])
        assert (np.frombuffer(found.pixels, np.uint8).reshape(224, 224, 3).transpose(2, 0, 1) == wanted).all()
        assert (found.grid, found.num_tokens) == ((1, 16, 16), 16)
    assert settings_of(tmp_path, GEMMA3).num_tokens((1, 64, 64)) == 256


@pytest.mark.parametrize("merge", [2, 1])
def test_pixtral_pixels_and_tokens_are_those_of_transformers(merge: int, tmp_path: Path) -> None:
    files, token = copy.deepcopy(PIXTRAL), 14 * merge
    if merge == 1:  # Pixtral 12B, whose class is that of LLaVA
        files["config.json"] |= {"model_type": "llava"}
        del files["config.json"]["spatial_merge_size"], files["processor_config.json"]
    files["preprocessor_config.json"]["size"] = {"longest_edge": 170}  # no multiple of a token's 28 pixels
    settings = settings_of(tmp_path, files)
    own = files["preprocessor_config.json"] | {"do_rescale": False, "do_normalize": False}
    reference = PixtralImageProcessorPil(**own)
    draw = random.Random(2)
    for seed in range(40):
        width, height = (draw.choice([draw.randint(1, 180), 28 * draw.randint(1, 9), 170]) for _ in "wh")
        image = drawn(draw.choice(["RGB", "L", "RGBA"]), width, height, seed)
        found = process(decode(of_file(image), MAX_PIXELS), settings, settings.sizes)
        # PixtralProcessor resizes to whole tokens, and writes a token behind each row of them.
        wanted = reference(images=[image], return_tensors="np", patch_size=token)
        high, wide = (int(it) for it in wanted["image_sizes"][0])
        assert found.grid == (1, high // 14, wide // 14)
        pixels = np.frombuffer(found.pixels, np.uint8).reshape(high, wide, 3)
        assert (pixels.transpose(2, 0, 1) == wanted["pixel_values"][0]).all()
        assert found.num_tokens == (wide // token + 1) * (high // token) - 1
    with pytest.raises(SizeError, match="1 x 900 pixels: within 170 x 170 one side would have none"):
        settings.sizes.resized(900, 1)


def test_internvls_tiles_and_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    draw = random.Random(4)
    for _ in range(5000):
        least, side = draw.choice([1, 2, 4]), draw.choice([28, 448])
        rule = Tiles(side, least, draw.choice([least, 6, 12]))
        # Also sizes of one ratio with several layouts, of which one is chosen by the image's area.
        height, width = (draw.choice([draw.randint(1, 2000), side * draw.randint(1, 4)]) for _ in "hw")
        assert rule.layout(height, width) == get_optimal_tiled_canvas(
            (height, width), (side, side), rule.least, rule.most
        )
    files = copy.deepcopy(INTERNVL)
    files["config.json"]["vision_config"]["image_size"] = 56
    files["preprocessor_config.json"] |= {"size": {"height": 56, "width": 56}, "max_patches": 6}
    files["processor_config.json"]["image_seq_length"] = 4
    settings = settings_of(tmp_path, files)
    # InternVLProcessor cuts images whatever the file says.
    own = files["preprocessor_config.json"] | {"do_rescale": False, "do_normalize": False, "crop_to_patches": True}
    reference = GotOcr2ImageProcessorPil(**own)
    for seed in range(24):
        image = drawn(draw.choice(["RGB", "L", "RGBA"]), draw.randint(1, 400), draw.randint(1, 400), seed)
        found = process(decode(of_file(image), MAX_PIXELS), settings, settings.sizes)
        wanted = reference(images=[image], return_tensors="np")
        num_tiles = int(wanted["num_patches"][0])
        assert (found.grid, found.num_tokens) == ((1, 4 * num_tiles, 4), 4 * num_tiles)
        tiles = np.frombuffer(found.pixels, np.uint8).reshape(num_tiles, 56, 56, 3)
        assert (tiles.transpose(0, 3, 1, 2) == wanted["pixel_values"]).all()
    assert settings_of(tmp_path, INTERNVL).most_tokens == 13 * 256
    whole = settings_of(tmp_path, INTERNVL).sizes
    assert [whole.at_most(it * 448**2).most_pixels // 448**2 for it in (0, 1, 2, 3, 8, 20)] == [1, 1, 1, 3, 8, 13]


def test_gemma_4s_pixels_and_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    draw = random.Random(3)
    for _ in range(5000):
        height, width = (draw.choice([draw.randint(1, 90), draw.randint(1, 5000)]) for _ in "hw")
        rule = TokenBudget(48, draw.choice([70, 280]))
        try:
            wanted = get_aspect_ratio_preserving_size(height, width, 16, rule.num_tokens * 9, 3)
        except ValueError:
            with pytest.raises(SizeError):
                rule.resized(height, width)
        else:
            assert rule.resized(height, width) == wanted
    settings = settings_of(tmp_path, GEMMA4)
    own = GEMMA4["processor_config.json"]["image_processor"] | {"do_rescale": False}
    reference = Gemma4ImageProcessorPil(**own)
    for seed, (width, height) in enumerate([(300, 299), (480, 240), (17, 5), (900, 40)]):
        image = drawn("RGB", width, height, seed)
        found = process(decode(of_file(image), MAX_PIXELS), settings, settings.sizes)
        made = reference(images=[image], return_tensors="np")
        _, rows, columns = found.grid
        patches = np.frombuffer(found.pixels, np.uint8).reshape(rows, 16, columns, 16, 3).transpose(0, 2, 1, 3, 4)
        assert (patches.reshape(rows * columns, -1) == made["pixel_values"][0][: rows * columns]).all()
        assert found.num_tokens == made["num_soft_tokens_per_image"][0]
    assert settings.most_tokens == 280


def test_an_orientation_turns_an_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    image = Image.new("RGB", (40, 20))
    image.paste((255, 0, 0), (0, 0, 20, 20))
    found = decode(of_file(image, "JPEG", exif=exif, quality=100), MAX_PIXELS)
    assert found.size == (20, 40)
    assert found.getpixel((10, 5)) == pytest.approx((254, 0, 0), abs=3)


def test_a_palette_with_transparency_lies_on_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.putpixel((0, 0), 0)
    found = decode(of_file(image, transparency=0), MAX_PIXELS)
    assert (found.getpixel((0, 0)), found.getpixel((1, 1))) == ((255, 255, 255), (9, 8, 7))


def test_sixteen_bits_give_their_higher_eight() -> None:
    assert decode(of_file(Image.new("I;16", (4, 4), 40_000)), MAX_PIXELS).getpixel((1, 1)) == (156,) * 3


def test_large_images_are_refused_before_they_are_decoded() -> None:
    whole = of_file(Image.new("1", (2000, 2000)))
    for data in (whole, whole[:100]):
        with pytest.raises(ImageError, match="the limit is 1000000"):
            decode(data, 10**6)
    # Pillow's decoder of WebP lets no other thread run.
    with pytest.raises(ImageError, match="the WEBP image has 16000 x 1000 = 16000000 pixels, the limit is 12000000"):
        decode(of_file(Image.new("RGB", (16_000, 1000)), "WEBP", method=0), 10**8)


def test_a_processor_that_does_more_is_refused_by_name(tmp_path: Path) -> None:
    files = copy.deepcopy(GEMMA3)
    files["preprocessor_config.json"]["do_pan_and_scan"] = True
    with pytest.raises(ModelError, match=r"do_pan_and_scan must be false: images are not cut"):
        ImageSettings.load(write(tmp_path, files))


@pytest.mark.parametrize(
    "given",
    [
        {"limit_images": 4},
        {"max_image_pixels": 10**6},
        {"max_image_tokens": 4096},
        {"max_num_batched_image_tokens": 512},
        {"allowed_media_hosts": "images.example"},
    ],
    ids=str,
)
def test_a_setting_of_images_needs_a_model_that_sees_them(tmp_path: Path, given: dict[str, Any]) -> None:
    [name] = given
    flag = f"--{name.replace('_', '-')}"
    text = write(tmp_path / "text", {"config.json": {"model_type": "llama"}})
    settings = Settings(**given)
    with pytest.raises(SettingsError, match=f"{flag} is of images, which this model does not see: leave it out"):
        images_of(settings, text)
    files = copy.deepcopy(GEMMA3)
    files["preprocessor_config.json"]["do_pan_and_scan"] = True
    with pytest.raises(SettingsError, match=rf"{flag} is of images.*\(.*do_pan_and_scan must be false.*\): leave it"):
        images_of(settings, write(tmp_path / "refused", files))
    seen, _ = images_of(settings, write(tmp_path / "seen", GEMMA3))
    assert seen is not None
    assert images_of(Settings(), text) == (None, None)
    assert images_of(Settings(limit_images=0), text) == (None, "--limit-images is 0")


def test_settings_of_a_nested_file_go_first(tmp_path: Path) -> None:
    files = copy.deepcopy(QWEN2_5_VL)
    files["processor_config.json"] = {"image_processor": files["preprocessor_config.json"] | {"max_pixels": 50_000}}
    assert settings_of(tmp_path, files).sizes == PixelRange(28, 3136, 50_000)
