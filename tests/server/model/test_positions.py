"""Positions of three parts, and tokens whose embeddings are given, against transformers (fp32, CPU)."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.step import Step
from support.models.image_positions import NUM_TOKENS, POSITIONS, save_with_positions, three_part
from support.models.paged_runner import PAGE_SIZE
from support.models.tiny_families import CPU, TINY, TOLERANCE, prompt


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen2.5-vl")
    return save_with_positions(folder), folder


def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out.copy_(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))


def logits(decoder: Decoder, positions: Tensor, **given: Tensor) -> Tensor:
    kv = KVCache.allocate(decoder.config, 4, PAGE_SIZE, torch.float32, CPU)
    step = Step(prompt(NUM_TOKENS), positions.int(), torch.arange(NUM_TOKENS), kv, attend, **given)
    return decoder.logits(decoder.forward(step))


def test_three_parts_that_are_equal_give_the_bits_of_one(reference: tuple[PreTrainedModel, Path]) -> None:
    decoder = three_part(reference[1])
    of_text = torch.arange(NUM_TOKENS)
    assert torch.equal(logits(decoder, of_text.expand(3, -1)), logits(decoder, of_text))


@torch.no_grad()
def test_an_image_stands_where_transformers_has_it(reference: tuple[PreTrainedModel, Path]) -> None:
    model, folder = reference
    image = torch.randn(6, TINY["hidden_size"], generator=torch.Generator().manual_seed(1))
    embeddings = torch.cat((torch.full((3, image.shape[1]), torch.nan), image))  # the first rows are not this image's
    rows = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    rows[3:9] = torch.arange(3, 9)
    whole = model.get_input_embeddings()(prompt(NUM_TOKENS))
    whole[3:9] = image
    due = model(inputs_embeds=whole[None], position_ids=POSITIONS[:, None]).logits[0]
    found = logits(three_part(folder), POSITIONS, embedding_rows=rows, embeddings=embeddings)
    assert (found - due).abs().max() <= TOLERANCE
