"""The decoder's steps of several prompts, and weights of another dtype, against transformers (fp32, CPU)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.kv_cache import KVCache
from server.model.load.load import load_config
from server.model.step import Step
from support.models.paged_runner import PAGE_SIZE
from support.models.tiny_families import CPU, TOLERANCE, load, prompt, reference_logits, save_reference


def test_two_prompts_in_one_batch_equal_each_alone(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, "llama", {})
    decoder = load(tmp_path)
    prompts = [prompt(11), prompt(6)]

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for rows in (slice(0, 11), slice(11, 17)):
            heads = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
            out[rows] = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    kv = KVCache.allocate(decoder.config, 5, PAGE_SIZE, torch.float32, CPU)
    positions = torch.cat([torch.arange(11), torch.arange(6)]).int()
    logits = decoder.logits(decoder.forward(Step(torch.cat(prompts), positions, torch.arange(17), kv, attend)))
    expected = torch.cat([reference_logits(reference, token_ids) for token_ids in prompts])
    assert (logits - expected).abs().max() <= TOLERANCE


def test_weights_of_another_dtype_are_rounded_on_the_way(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, "llama", {}).bfloat16()
    reference.save_pretrained(tmp_path)
    assert load_config(tmp_path).dtype == "bfloat16"
    assert torch.equal(load(tmp_path).weights.embedding, reference.model.embed_tokens.weight.float())
