"""Count the recipes for serving whose models load: the reader of config.json, over each of `recipes.toml`.

PYTHONPATH=. python trials/recipes.py --out docs/benchmarks/recipes.json

Of each model the server's reader says that it loads, or refuses it by one line. A model that loads and of which some
shape has no first choice of a kernel on an H200 is one that loads by fallbacks.
"""

import argparse
import json
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from bench.machine import head_of_cpu
from kernels.catalog import ALL_PATHS
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import operator_of
from kernels.vocabulary.path import Tier
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import plan_shapes
from qualification.decision.presets import preset_named
from qualification.model.config import ModelConfig
from server.errors import ModelError
from server.model.load.load import load_config

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")
_FP8: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
QUANTIZATIONS: Mapping[str, Mapping[str, object]] = {
    "fp8 blocks": {
        **_FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "fp8 blocks, no list": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
    "int4 experts": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }},
    },
    "fp8 static": {**_FP8, "activation_scheme": "static", "weight_block_size": None},
    "fp8 channels": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:model\\.layers\\.80\\..*"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }},
    },
    "mxfp4": {"quant_method": "mxfp4"},
}  # fmt: skip


def config_of(recipe: Mapping[str, Any]) -> tuple[dict[str, object], str]:
    """Return a model's config.json, and where it is from."""
    if "preset" in recipe:
        return dict(preset_named(recipe["preset"]).config), "keys of the published file"
    if "class" in recipe:
        name = recipe["class"]
        model_type = recipe.get("type", name.partition("For")[0].lower())
        config: dict[str, object] = {"model_type": model_type, "architectures": [name], **recipe.get("sizes", {})}
        return _quantized(config, recipe), f"the published class {'and sizes' if 'sizes' in recipe else 'alone'}"
    model_type, sizes = recipe["type"], dict(recipe.get("sizes", {}))
    if "text" in recipe:
        sizes["model_type"] = recipe["text"]
    given = {recipe["part"]: sizes} if "part" in recipe else sizes
    config = CONFIG_MAPPING[model_type](**given).to_dict()
    names = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = next((it[model_type] for it in names if model_type in it), None)
    config["architectures"] = [found] if isinstance(found, str) else list(found or ())
    config["model_type"] = recipe.get("read_as", config["model_type"])
    known = "with the published sizes" if recipe.get("sizes") else "with its own sizes"
    return _quantized(config, recipe), f"transformers' class, {known}"


def _quantized(config: dict[str, object], recipe: Mapping[str, Any]) -> dict[str, object]:
    """Return a config.json with the quantization that a recipe names, where it names one."""
    if "quantization" not in recipe:
        return config
    return config | {"quantization_config": dict(QUANTIZATIONS[recipe["quantization"]])}


def fallbacks_of(model: ModelConfig) -> list[str]:
    """The operators of which some shape has no first choice of a kernel on an H200, by the default settings."""
    shapes = plan_shapes(model, limits_of(model, "cuda", Choices()), "cuda")
    paths = [path for path in ALL_PATHS if path.tier is Tier.FIRST]
    return sorted({operator_of(it).value for it in shapes if all(path.rejects(it, H200) for path in paths)})


def row_of(name: str, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return a model, whether it loads, and the reason where it does not."""
    config, origin = config_of(recipe)
    row = {"model": name, "class": ", ".join(config.get("architectures") or ["?"]), "config": origin}  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            model = load_config(Path(folder))
        except ModelError as error:
            return row | {"outcome": "refused", "reason": str(error).replace(f"{folder}/", "")}
    missing = fallbacks_of(model)
    if missing:
        return row | {"outcome": "loads by fallbacks", "reason": f"no first choice on an H200: {', '.join(missing)}"}
    return row | {"outcome": "loads"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    recipes = tomllib.loads((Path(__file__).parent / "recipes.toml").read_text())
    rows = [row_of(name, recipe) for name, recipe in recipes.items()]
    for row in rows:
        print(f"{row['outcome']:20} {row['model']}  {row.get('reason', '')}", flush=True)
    count = dict(Counter(row["outcome"] for row in rows))
    print(len(rows), count)
    if asked.out is not None:
        head = head_of_cpu("PYTHONPATH=. python trials/recipes.py")
        asked.out.write_text(json.dumps({**head, "recipes": len(rows), "count": count, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
