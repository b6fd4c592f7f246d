"""A preset qualifies exactly the attention that the server will need for that model."""

import json
from pathlib import Path

import pytest

from qualification.decision.presets import PRESETS, Preset
from qualification.model.families.image_models import without_image_spans
from qualification.model.families.reader import read_model
from server.model.load.load import load_config

SERVED = [preset for preset in PRESETS if preset.is_served]


@pytest.mark.parametrize("preset", SERVED, ids=lambda preset: preset.name)
def test_the_server_reads_the_model_that_is_qualified(preset: Preset, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset.whole))
    # No file says how images are processed here, so that none are served.
    assert load_config(tmp_path) == without_image_spans(read_model(preset.whole))
