"""Write a gpt-oss checkpoint of random weights beside a folder's config.json, so that two servers load the same ones.

    python trials/random_gpt_oss.py FOLDER

Writes model.safetensors: experts in mxfp4, everything else in bf16. On the GPU where there is one: 13 GB for 20b.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 32  # numbers with one scale
SCALES = 116, 122  # exponents, of bias 127: a number is 0.02 on average, as the other weights are
STD = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds config.json")
    folder: Path = parser.parse_args().folder
    config = json.loads((folder / "config.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator(device).manual_seed(20)

    def normal(*sizes: int) -> Tensor:
        return (torch.randn(sizes, generator=random, device=device) * STD).bfloat16().cpu()

    def whole(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=random, device=device, dtype=torch.uint8).cpu()

    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    head_dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "lm_head.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = ones.clone()
        sizes = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden)}
        for name, (of_name, size_in) in sizes.items():
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(of_name * head_dim, size_in)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(of_name * head_dim)
        tensors[f"{at}.self_attn.o_proj.weight"] = normal(hidden, heads * head_dim)
        tensors[f"{at}.self_attn.o_proj.bias"] = normal(hidden)
        tensors[f"{at}.self_attn.sinks"] = normal(heads)
        tensors[f"{at}.mlp.router.weight"] = normal(experts, hidden)
        tensors[f"{at}.mlp.router.bias"] = normal(experts)
        for name, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            of = f"{at}.mlp.experts.{name}_proj"
            tensors[f"{of}_blocks"] = whole(0, 256, experts, rows, columns // BLOCK, BLOCK // 2)
            tensors[f"{of}_scales"] = whole(*SCALES, experts, rows, columns // BLOCK)
            tensors[f"{of}_bias"] = normal(experts, rows)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
