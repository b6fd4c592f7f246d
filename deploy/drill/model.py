"""The drill's model before and after its upgrade: random weights, and heads of 64 or of 320 dimensions."""

import json
import shutil
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "server" / "model" / "demo"
STABLE_HEAD_DIM, UPGRADED_HEAD_DIM = 64, 320  # no wanted path takes more than 256
VOCAB_SIZE = 4096  # of the demo's tokenizer


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
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
