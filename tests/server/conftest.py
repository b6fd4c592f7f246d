"""A tokenizer's folder and a tiny model on disk, each made once."""

from pathlib import Path

import pytest
from edge_fakes import write_tokenizer
from tiny_llama import TinyLlama, make_tiny_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
