"""A server of a model that sees images, with Qwen 2.5 VL's processor and template; its engine follows a script."""

import base64
import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from server.http.images.fetch import MediaFetcher
from server.http.images.reader import ImageReader
from server.http.services import ServedImages
from server.model.images.settings import ImageSettings
from server.settings import Settings
from support.api.edge_fakes import (
    MAX_MODEL_LEN,
    READY,
    ScriptedEngine,
    Served,
    make_services,
    with_model,
    write_tokenizer,
)
from support.images.processor_files import GEMMA3, GEMMA4, INTERNVL, PIXTRAL, QWEN2_5_VL, write

START, STOP, PAD = 257, 258, 259
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a tokenizer of bytes, a template and the files of a processor; images have 16 to 256 tokens."""
    files = copy.deepcopy(QWEN2_5_VL)
    files["config.json"]["image_token_id"] = PAD
    files["preprocessor_config.json"] |= {"min_pixels": 16 * 28 * 28, "max_pixels": 256 * 28 * 28}
    write(folder, files)
    write_tokenizer(folder, template=TEMPLATE, special=["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    return folder


def write_gemma(folder: Path) -> Path:
    """Write the same with Gemma 3's processor, of 16 tokens an image."""
    files = copy.deepcopy(GEMMA3)
    files["config.json"] |= {"boi_token_index": START, "eoi_token_index": STOP, "image_token_index": PAD}
    files["preprocessor_config.json"]["size"] = {"height": 224, "width": 224}
    files["processor_config.json"]["image_seq_length"] = 16
    write(folder, files)
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")
    write_tokenizer(folder, template=template, special=["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    return folder


def write_gemma_4(folder: Path) -> Path:
    """Write the same with Gemma 4's processor."""
    files = copy.deepcopy(GEMMA4)
    files["config.json"] |= {"boi_token_id": START, "eoi_token_id": STOP, "image_token_id": PAD}
    files["processor_config.json"]["image_processor"]["max_soft_tokens"] = 70
    write(folder, files)
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    write_tokenizer(folder, template=template, special=["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    return folder


def write_internvl(folder: Path) -> Path:
    """Write the same with InternVL's processor, of 4 tokens a tile."""
    files = copy.deepcopy(INTERNVL)
    files["config.json"]["image_token_id"] = PAD
    files["config.json"]["vision_config"]["image_size"] = [56, 56]
    files["preprocessor_config.json"]["size"] = {"height": 56, "width": 56}
    files["processor_config.json"]["image_seq_length"] = 4
    write(folder, files)
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>")
    write_tokenizer(folder, template=template, special=["<img>", "</img>", "<IMG_CONTEXT>"])
    return folder


def write_pixtral(folder: Path) -> Path:
    """Write the same with Pixtral's processor."""
    files = copy.deepcopy(PIXTRAL)
    files["config.json"]["image_token_index"] = PAD
    write(folder, files)
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    write_tokenizer(folder, template=template, special=["[IMG_BREAK]", "[IMG_END]", "[IMG]"])
    return folder


def served_images(folder: Path, *, fetcher: MediaFetcher | None = None, **settings: Any) -> Served:
    engine = ScriptedEngine()
    engine.ready = msgspec.structs.replace(READY, max_image_tokens=MAX_MODEL_LEN)
    given = Settings(model="tiny", **settings)
    images = ImageSettings.load(folder)
    assert images is not None
    services = with_model(make_services(folder, engine, given), images=ServedImages(images, given.limit_images))
    fetcher = fetcher or MediaFetcher.of(given.allowed_media_hosts, given.max_body_bytes)
    return Served(replace(services, images=ImageReader(images, fetcher, given.max_image_pixels)), engine)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def picture(width: int, height: int, colour: tuple[int, int, int] = (9, 8, 7)) -> str:
    return data_url(file_of(Image.new("RGB", (width, height), colour)))


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}
