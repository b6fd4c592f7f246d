import pytest

from support.engine.attested import Subject
from support.models.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def subject(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject.made(tiny_llama, tmp_path_factory.mktemp("cache"))
