"""Compiles one variant of each Triton kernel that starts of some models launch, on a pretended H200.

python starts_compile.py NAME:LAYERS ...

NAME is that of a preset, of a recipe in trials/recipes.toml, or a model_type of `DEFAULTS`. Prints as JSON the number
of kernels of each model that none before it has ("new"), and of those that cannot be compiled the error ("failed").
"""

import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from qualification.compiling.pretended_gpu import PretendedTensors
from qualification.compiling.wanted import WantedKernels, name_of
from qualification.decision.presets import preset_named
from server.engine.startup import builder
from support.compiled.pretended_start import settings_on_paper, write_model

# Of transformers' defaults, what a start needs besides.
DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"architectures": ["FalconH1ForCausalLM"], "ssm_multipliers": [0.5, 2.0, 1.0, 0.25, 1.0]}
}
TRIALS = Path(__file__).resolve().parents[3] / "trials"


def config_of(name: str) -> dict[str, object]:
    if name in DEFAULTS:
        return dict(CONFIG_MAPPING[name](**DEFAULTS[name]).to_dict())
    if "/" not in name:
        return dict(preset_named(name).config)
    sys.path.insert(0, str(TRIALS))
    import recipes

    found: dict[str, object] = recipes.config_of(tomllib.loads((TRIALS / "recipes.toml").read_text())[name])[0]
    return found


def main() -> None:
    new: dict[str, int] = {}
    failed: dict[str, str] = {}
    compiled: set[str] = set()
    for name, _, layers in (it.rpartition(":") for it in sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder, "model"), config_of(name), int(layers))
            settings = settings_on_paper(folder, {"max_model_len": 4096, "max_num_seqs": 8, "limit_images": 0})
            wanted = WantedKernels()
            with wanted, PretendedTensors():
                builder.build_engine(settings, frozenset(), lambda *_: None)
        before = len(compiled)
        for compile_fn in wanted.by_key.values():
            kernel = name_of(compile_fn)
            if kernel in compiled:
                continue
            compiled.add(kernel)
            try:
                compile_fn()
            except Exception as error:  # of any kind: Triton's, LLVM's, ptxas'
                failed[kernel] = f"{name}: {type(error).__name__}: {error}"[:400]
        new[name] = len(compiled) - before
    print(json.dumps({"new": new, "failed": failed}))


if __name__ == "__main__":
    main()
