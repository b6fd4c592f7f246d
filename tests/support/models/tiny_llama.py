"""A tiny Llama on disk, and what transformers says about it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 97
NAN_TOKEN = 96  # its embedding is NaN: a prompt that holds it has no finite logits
NUM_LAYERS = 2
NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 2, 16, 33, 50, 71)


@dataclass(frozen=True)
class TinyLlama:
    folder: Path
    prompts: list[list[int]]
    greedy: list[list[int]]  # NUM_TOKENS tokens for each prompt, by transformers


def tiny_config(*, hidden_size: int = 64, num_heads: int = 4, num_kv_heads: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=256,
        initializer_range=0.3,  # large, so that the best token leads by far more than rounding can move
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def make_tiny_llama(folder: Path) -> TinyLlama:
    """Save the model to `folder`."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(tiny_config()).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = torch.nan
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, NAN_TOKEN, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    greedy = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            suppress_tokens=[NAN_TOKEN],
        )
        greedy.append(output[0, len(prompt) :].tolist())
    return TinyLlama(folder, prompts, greedy)
