"""A tokenizer's folder and a tiny model, on disk and loaded, each made once."""

from pathlib import Path

import pytest
import torch

from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat
from support.api.edge_fakes import write_tokenizer
from support.models.tiny_llama import TinyLlama, make_tiny_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def decoder(tiny_llama: TinyLlama) -> Decoder:
    """The tiny model's decoder in fp32."""
    config, device = load_config(tiny_llama.folder), torch.device("cpu")
    return load_decoder(tiny_llama.folder, config, dtype=torch.float32, device=device, load_format=LoadFormat.AUTO)
