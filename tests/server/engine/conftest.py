import pytest
from tiny_llama import TinyLlama, make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
