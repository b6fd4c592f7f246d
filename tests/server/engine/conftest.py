"""A tiny model on disk, and the evidence of tests/qualification for engines that measure none."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "qualification"))

from tiny_llama import TinyLlama, make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
