"""Quantised checkpoints of tests: the parts of each product, and another word in config.json."""

import json
from pathlib import Path

from server.model.linear import WeightName

PARTS = {
    WeightName.QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    WeightName.OUTPUT: ("self_attn.o_proj",),
    WeightName.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    WeightName.DOWN: ("mlp.down_proj",),
}


def change(folder: Path, **says: object) -> None:
    """Change words of quantization_config."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= says
    path.write_text(json.dumps(values))
