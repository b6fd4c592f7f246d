"""Fixtures of several folders of tests: a tiny model on disk and loaded, and a server that follows a script."""

from collections.abc import Iterator

import pytest
import torch

from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat
from support.models.tiny_llama import TinyLlama, make_tiny_llama
from support.ranks.forks import Forks, forking
from support.scripted_server import Script, serving


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    """Address of a server that follows the script."""
    with serving(script) as url:
        yield url


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def decoder(tiny_llama: TinyLlama) -> Decoder:
    """The tiny model's decoder in fp32."""
    config, device = load_config(tiny_llama.folder), torch.device("cpu")
    return load_decoder(tiny_llama.folder, config, dtype=torch.float32, device=device, load_format=LoadFormat.AUTO)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with forking() as forks:
        yield forks
