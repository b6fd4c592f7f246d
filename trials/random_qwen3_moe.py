"""Write a Qwen3-MoE checkpoint of random weights beside a folder's config.json, so that two servers load the same ones.

    python trials/random_qwen3_moe.py FOLDER [--jobs 8]

Writes model-*.safetensors (three layers each) and their index, all in bf16: 61 GB for 30B-A3B, by several processes,
drawn on the GPU where there is one. What a token brings stays the larger part of what a layer sees, as its embedding is
of size 1 and what a layer adds is small: so tokens are spread over all experts, as those of a trained model are. (With
all weights of one size, the mean that attention takes of random values soon outweighs the token, and all tokens of a
sequence go to the same few experts.)
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS = 3  # of one file
STD = 0.02

Drawn = tuple[list[str], tuple[int, ...], float | None]  # names, shape of each, standard deviation; None: ones
Task = tuple[Path, dict[str, Any], int, int, Sequence[int]]  # folder, config, number of a file, of how many, its layers


def drawn_at_once(config: dict[str, Any], layers: Sequence[int]) -> Iterator[Drawn]:
    """The tensors of some layers, or of none what lies outside them."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    head_dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    small = STD / math.sqrt(2 * config["num_hidden_layers"])
    if not layers:
        yield ["model.embed_tokens.weight"], (config["vocab_size"], hidden), 1.0
        yield ["lm_head.weight"], (config["vocab_size"], hidden), STD
        yield ["model.norm.weight"], (hidden,), None
    for layer in layers:
        at = f"model.layers.{layer}"
        yield [f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"], (hidden,), None
        yield [f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"], (head_dim,), None
        yield [f"{at}.self_attn.q_proj.weight"], (heads * head_dim, hidden), STD
        yield [f"{at}.self_attn.k_proj.weight", f"{at}.self_attn.v_proj.weight"], (kv_heads * head_dim, hidden), STD
        yield [f"{at}.self_attn.o_proj.weight"], (hidden, heads * head_dim), small
        yield [f"{at}.mlp.gate.weight"], (experts, hidden), STD
        products = (("gate", (width, hidden), STD), ("up", (width, hidden), STD), ("down", (hidden, width), small))
        for name, shape, std in products:
            yield [f"{at}.mlp.experts.{expert}.{name}_proj.weight" for expert in range(experts)], shape, std


def write(task: Task) -> tuple[dict[str, str], int]:
    """Write one file. Returns the file of each of its tensors, and their bytes."""
    folder, config, number, of, layers = task
    name = f"model-{number:05}-of-{of:05}.safetensors"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator(device).manual_seed(30 + number)
    tensors: dict[str, Tensor] = {}
    for names, shape, std in drawn_at_once(config, layers):
        drawn = torch.ones(len(names), *shape, dtype=torch.bfloat16, device=device)
        if std is not None:
            drawn.normal_(0, std, generator=random)
        tensors |= zip(names, (it.cpu().clone() for it in drawn), strict=True)  # safetensors takes no shared memory
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, name), sum(it.nbytes for it in tensors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds config.json")
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    began, config = time.monotonic(), json.loads((args.folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    parts: list[Sequence[int]] = [(), *(range(first, min(first + LAYERS, count)) for first in range(0, count, LAYERS))]
    tasks = [(args.folder, config, number, len(parts), part) for number, part in enumerate(parts, 1)]
    weight_map: dict[str, str] = {}
    total = 0
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(tasks))) as pool:
        for names, num_bytes in pool.imap_unordered(write, tasks):
            weight_map |= names
            total += num_bytes
            print(f"{time.monotonic() - began:6.1f} s: {total / 1e9:.1f} GB", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return 0


if __name__ == "__main__":
    sys.exit(main())
