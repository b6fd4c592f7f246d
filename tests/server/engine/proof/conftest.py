import pytest
from attested import Subject
from tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def subject(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject.made(tiny_llama, tmp_path_factory.mktemp("cache"))
