from collections.abc import Iterator

import pytest

from support.scripted_server import Script, serving


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    """Address of a server that follows the script."""
    with serving(script) as url:
        yield url
