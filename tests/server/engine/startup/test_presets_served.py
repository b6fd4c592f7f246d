"""A preset qualifies exactly the attention that the server will need for that model."""

import json
from pathlib import Path

import pytest

from qualification.decision.model_shapes import signature_from_config
from qualification.decision.presets import PRESETS, Preset
from server.engine.startup.attention_plan import signature_of
from server.model.families.registry import FAMILIES
from server.model.load.load import load_config

# What a config.json needs besides, for a server to read it.
REST = {"vocab_size": 100, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
ARCHITECTURES = {family.model_type: list(family.architectures) for family in FAMILIES}
SERVED = [preset for preset in PRESETS if preset.config["model_type"] in ARCHITECTURES]


@pytest.mark.parametrize("preset", SERVED, ids=lambda preset: preset.name)
def test_the_server_reads_the_attention_that_the_preset_qualifies(preset: Preset, tmp_path: Path) -> None:
    config = dict(preset.config)
    config |= REST | {"architectures": ARCHITECTURES[str(config["model_type"])]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert signature_of(load_config(tmp_path)) == signature_from_config(preset.config)
