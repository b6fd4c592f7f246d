"""Engines of small models that see images, and what transformers answers to the same prompts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from qualification.model.shard import shard_of
from server.model.decoder import Decoder
from server.model.load.load import load_config, load_shard
from server.model.vision.load import load_tower, with_own_tower
from server.model.vision.tower import Pixels, Tower
from server.protocol.images import PromptImage
from server.protocol.messages import SamplingParams, Submit
from support.engine.late_dispatch import CPU
from support.engine.served_decoder import ServedDecoder
from support.models.tiny_images import IMAGE

PIXELS = Pixels((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
PAGE_SIZE = 16
_TYPE_NAMES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "gemma4_unified": "mm_token_type_ids"}
Prompt = tuple[list[int], tuple[PromptImage, ...]]


def load_with_tower(folder: Path) -> tuple[Decoder, Tower]:
    """Return a folder's decoder and tower, in fp32."""
    config = with_own_tower(folder, load_config(folder))
    weights = load_shard(folder, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)
    assert config.tower is not None
    tower = load_tower(folder, config.tower, dtype=torch.float32, device=CPU)
    return Decoder(config, weights), Tower(config.tower, tower, PIXELS, is_reproducible=False)


class ImageSession(ServedDecoder):
    """A session whose requests may have images."""

    def __init__(
        self,
        decoder: Decoder,
        tower: Tower,
        *,
        max_step: int = 64,
        num_pages: int = 128,
        num_rows: int = 64,
        max_written: int | None = None,
    ) -> None:
        """`num_rows` of embeddings of images; `max_written` of them are computed in a step."""
        super().__init__(
            decoder, tower=tower, num_embeddings=num_rows, max_written=max_written, num_pages=num_pages,
            page_size=PAGE_SIZE, max_seqs=min(8, max_step), max_step=max_step, max_len=512, runs_ahead=False,
        )  # fmt: skip

    def ask(self, name: str, prompt: Prompt, max_tokens: int, **more: object) -> None:
        """Submit a prompt, answered by the likeliest tokens."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.submit(Submit(name, prompt[0], sampling, images=prompt[1], **more))  # type: ignore[arg-type]

    def num_computed_images(self) -> int:
        """Return how many images the tower has computed since the last call."""
        return sum(it.num_images for it in self.worker.tower_timer.take())


def _planes_of(image: PromptImage, side: int) -> torch.Tensor:
    """Return an image's numbers [3, height, width], normalised by PIXELS."""
    _, height, width = image.grid
    values = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(height * side, width * side, 3)
    numbers = ((values.double() / 255 - torch.tensor(PIXELS.mean)) / torch.tensor(PIXELS.deviation)).float()
    return numbers.permute(2, 0, 1)


def _patches_of(images: Sequence[PromptImage], side: int, num_frames: int = 2, merge: int = 2) -> torch.Tensor:
    """Return the patches [patches, numbers] of images as Qwen's processors give them, normalised by PIXELS."""
    found = []
    for image in images:
        _, height, width = image.grid
        frames = _planes_of(image, side).expand(num_frames, -1, -1, -1)
        blocks = frames.reshape(num_frames, 3, height // merge, merge, side, width // merge, merge, side)
        found.append(blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(height * width, -1))
    return torch.cat(found)


def _given(model: PreTrainedModel, images: Sequence[PromptImage], side: int) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of images, as its processor gives it."""
    if model.config.model_type == "gemma3":
        return {"pixel_values": torch.stack([_planes_of(image, side) for image in images])}
    if model.config.model_type == "internvl":
        return {"pixel_values": torch.cat([_tiles_of(_planes_of(image, side)) for image in images])}
    if model.config.model_type == "paddleocr_vl":
        squares = [_planes_of(image, side).unfold(1, side, side).unfold(2, side, side) for image in images]
        patches = torch.cat([it.permute(1, 2, 0, 3, 4).flatten(0, 1) for it in squares])  # row by row of an image
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([image.grid for image in images])}
    if model.config.model_type not in ("llava", "mistral3", "gemma4", "gemma4_unified"):
        grids = torch.tensor([image.grid for image in images])
        return {"pixel_values": _patches_of(images, side), "image_grid_thw": grids}
    planes = [_planes_of(image, side) for image in images]
    if model.config.model_type == "gemma4":
        return _in_places([it / 2 + 0.5 for it in planes], side)  # which the model's class takes off
    if model.config.model_type == "gemma4_unified":
        return _in_places(planes, side)
    height, width = (max(it.shape[dim] for it in planes) for dim in (1, 2))
    padded = [pad(it, (0, width - it.shape[2], 0, height - it.shape[1])) for it in planes]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([it.shape[1:] for it in planes])}


def _tiles_of(planes: torch.Tensor) -> torch.Tensor:
    """Return the squares of a column of such, [tiles, 3, side, side]."""
    return torch.stack(torch.split(planes, planes.shape[2], dim=1))


def _in_places(planes: Sequence[torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """Return patches, colours last, with the column and the row of each, -1 where one is not there."""
    patches, places = [], []
    most = max(it[0].numel() for it in planes) // side**2
    for plane in planes:
        squares = plane.unfold(1, side, side).unfold(2, side, side)  # [3, rows, columns, side, side]
        height, width = squares.shape[1:3]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        given = squares.permute(1, 2, 3, 4, 0).reshape(height * width, -1)
        patches.append(pad(given, (0, 0, 0, most - len(given))))
        at = torch.stack((columns.flatten(), rows.flatten()), dim=1)
        places.append(pad(at, (0, 0, 0, most - len(given)), value=-1))
    return {"pixel_values": torch.stack(patches), "image_position_ids": torch.stack(places)}


def rows_of(model: PreTrainedModel, images: Sequence[PromptImage], side: int) -> torch.Tensor:
    """Return what transformers' tower makes of images, [tokens, row size]. `side`: pixels of a patch."""
    given = _given(model, images, side)
    if model.config.model_type in ("gemma3", "internvl"):
        rows: torch.Tensor = model.model.get_image_features(**given).pooler_output
        return rows.flatten(0, 1)
    if "image_grid_thw" not in given or model.config.model_type == "paddleocr_vl":
        return torch.cat(model.model.get_image_features(**given).pooler_output)
    found = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
    return torch.cat((found.pooler_output, *getattr(found, "deepstack_features", ())), dim=1)


def answer_of(model: PreTrainedModel, prompt: Prompt, side: int, max_tokens: int) -> list[int]:
    """Return transformers' likeliest tokens. `side`: pixels of a patch."""
    ids, images = prompt
    token_ids = torch.tensor([ids])
    given, cache = {}, None
    if images:
        given = _given(model, images, side)
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (token_ids == IMAGE).int()
        if model.config.model_type in _TYPE_NAMES:
            given[_TYPE_NAMES[model.config.model_type]] = (token_ids == IMAGE).int()
    if model.config.model_type == "gemma4_unified":
        # Its masks are those of `create_masks_for_vision_model`, as Gemma 4's, where `generate` makes them; its forward
        # alone (transformers 5.24) makes Gemma 3's, whose images are seen whole and in layers without a window too.
        cache = "static"
    whole = model.generate(
        input_ids=token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, cache_implementation=cache, **given,
    )  # fmt: skip
    found: list[int] = whole[0, len(ids) :].tolist()
    return found
