"""The tokenizer's folder, made once."""

from pathlib import Path

import pytest
from edge_fakes import write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path
