"""Write a folder that a server starts with: a preset's config.json, the demo's tokenizer, random weights if asked.

    python trials/model_folder.py llama-3.1-70b FOLDER --rounding fp8             then: --load-format dummy
    python trials/model_folder.py llama-3.1-8b FOLDER --layers 8 --std 0.04       one safetensors file, in bf16

Dummy weights are so small that an answer's bits hardly depend on anything; of a standard deviation of 0.04 they do.
Norms are drawn around 1. On a GPU the numbers are drawn there.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from qualification.decision.presets import Rounding, preset_named, rounded_config
from qualification.model.families.registry import family_named
from server.model.empty_weights import empty_weights
from server.model.load.load import load_config
from server.model.tensor_views import checkpoint_views

DEMO = Path(__file__).resolve().parents[1] / "server" / "model" / "demo"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_config(folder: Path, preset: str, *, layers: int | None, rounding: Rounding | None) -> None:
    """Write all but weights. Raises ValueError where the preset is quantised already."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(preset_named(preset).config)
    if layers is not None:
        config["num_hidden_layers"] = layers
    if rounding is not None:
        config = dict(rounded_config(config, rounding))
    of_demo = json.loads((DEMO / "config.json").read_text())
    config |= {name: of_demo[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, folder / name)


def write_weights(folder: Path, std: float, seed: int) -> int:
    """Write random weights in bf16 of a folder's plain config.json; return their bytes."""
    config = load_config(folder)
    names = family_named(config.family, str(folder)).tensors
    assert names is not None, "the family is served"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        on_paper = checkpoint_views(empty_weights(config, torch.bfloat16, torch.device("meta")), config, names)
        tensors = {}
        for name, view in on_paper.items():
            values = torch.randn(view.values.shape, generator=draw, device=device, dtype=torch.float32).mul_(std)
            tensors[name] = (values.add_(1) if "norm" in name else values).to(torch.bfloat16).cpu()
    save_file(tensors, folder / "model.safetensors")
    return sum(it.nbytes for it in tensors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="the first so many")
    parser.add_argument("--rounding", type=Rounding, help=" or ".join(it.value for it in Rounding))
    parser.add_argument("--std", type=float, help="of random weights; none are written without")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.std is not None and args.rounding is not None:
        parser.error("--std writes 16 bits, and --rounding asks for 8: leave one out, serve with --quantization fp8")
    write_config(args.folder, args.preset, layers=args.layers, rounding=args.rounding)
    if args.std is not None:
        print(f"{write_weights(args.folder, args.std, args.seed) / 1e9:.2f} GB of weights in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
