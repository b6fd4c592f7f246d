"""A tokenizer's folder, and a tiny model on disk and loaded, each made once."""

from pathlib import Path

import pytest

from support.api.edge_fakes import write_tokenizer
from support.fixtures import decoder, forks, tiny_llama

__all__ = ["decoder", "folder", "forks", "tiny_llama"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path
