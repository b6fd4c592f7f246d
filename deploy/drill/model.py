"""The drills' models, small and of random weights: heads of 64 or of 320 dimensions, and one with a window."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

DEMO = Path(__file__).resolve().parents[2] / "server" / "model" / "demo"
STABLE_HEAD_DIM, UPGRADED_HEAD_DIM = 64, 320  # no wanted path takes more than 256
VOCAB_SIZE = 4096  # of the demo's tokenizer
# Tokens that the windowed model sees: more than the golden prompts of every bucket but le_2k have.
WINDOW = 600
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS = 128, 4, 8, 2


def write_model(folder: Path, head_dim: int) -> Path:
    """A model of two layers; served with --load-format dummy. Attention is most of the work of a long prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _write(folder, config)


def write_windowed_model(folder: Path) -> Path:
    """A model with a sliding window, and weights of a trained one's size: dummy ones would give every token the same
    probability whatever attention computes. Attention is most of the work of a long prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": STABLE_HEAD_DIM,
        "sliding_window": WINDOW,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    save_file(_windowed_weights(), folder / "model.safetensors")
    return _write(folder, config)


def _windowed_weights() -> dict[str, torch.Tensor]:
    """Norms of one, matrices that keep a row's size; attention's own part is made larger, so that it is seen."""
    queries, keys = _HEADS * STABLE_HEAD_DIM, _KV_HEADS * STABLE_HEAD_DIM
    sizes = {
        "self_attn.q_proj": (queries, _HIDDEN),
        "self_attn.k_proj": (keys, _HIDDEN),
        "self_attn.v_proj": (keys, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, queries),
        "mlp.gate_proj": (_HIDDEN, _HIDDEN),
        "mlp.up_proj": (_HIDDEN, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)

    def drawn(size: tuple[int, int], gain: float = 1.0) -> torch.Tensor:
        weight: torch.Tensor = torch.randn(size, generator=generator) * 1.28 * gain * size[1] ** -0.5
        return weight

    weights = {"model.embed_tokens.weight": drawn((VOCAB_SIZE, _HIDDEN)), "model.norm.weight": torch.ones(_HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            weights[f"{prefix}{name}.weight"] = drawn(size, 5.0 if "o_proj" in name else 1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(_HIDDEN)
    return weights


def _write(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
