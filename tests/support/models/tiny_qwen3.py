"""Tiny random Qwen 3 models on disk, as Qwen3-Embedding and Qwen3-Reranker are saved, with a tokenizer a byte."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import processors
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from support.api.edge_fakes import write_tokenizer

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
YES, NO = 300, 301


def tiny_config(*, ties: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=ties,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
    )


def write_words(folder: Path) -> None:
    """A tokenizer with one token a byte, special tokens, and yes and no as whole tokens; it appends <|end|>."""
    write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    spare = [f"<|spare{i}|>" for i in range(YES - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens(spare)
    tokenizer.add_tokens(["yes", "no"])
    assert [tokenizer.token_to_id(word) for word in ("yes", "no")] == [YES, NO]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def make_embedding_model(folder: Path) -> Qwen3Model:
    """Save it as Qwen3-Embedding is: without a head, and tensors without the prefix `model.`; untied as the 8B."""
    torch.manual_seed(11)
    model = Qwen3Model(tiny_config(ties=False)).float().eval()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]  # as the real one says
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))
    write_words(folder)
    return model


def make_reranker(folder: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(12)
    model = Qwen3ForCausalLM(tiny_config(ties=True)).float().eval()
    model.save_pretrained(folder)
    write_words(folder)
    return model
