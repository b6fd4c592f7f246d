"""A tiny Qwen 2.5 VL whose positions have three parts, and those of a prompt with an image."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from server.model.decoder import Decoder
from support.models.tiny_families import TINY, image_model, load

NUM_TOKENS = 13
# Text, an image of 2 x 3 patches, text that goes on behind the longest of its sides: as Qwen 2.5 VL counts.
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9],
    ]
)


def save_with_positions(folder: Path) -> PreTrainedModel:
    """Save transformers' model, which takes positions [3, batch, tokens]."""
    config_class, model_class, of_text, vision = image_model("qwen2.5 vl")
    torch.manual_seed(0)
    model = model_class(config_class(text_config={**TINY, **of_text}, vision_config=vision)).float().eval()
    model.save_pretrained(folder)
    return model


def three_part(folder: Path) -> Decoder:
    """Rotate the pairs of each head by sections of 2, 1 and 1, as the checkpoint's mrope_section has it."""
    plain = load(folder)
    rope = replace(plain.config.layers[0].attention.rope, position_parts=(0, 0, 1, 2))
    layers = tuple(replace(it, mixer=replace(it.attention, rope=rope)) for it in plain.config.layers)
    return Decoder(replace(plain.config, layers=layers), plain.weights)
