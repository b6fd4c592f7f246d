"""Shared by all tests: Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRET = "TRITON_INTERPRET"


def pytest_configure() -> None:
    """Triton decides when a kernel is imported: without a GPU all kernels are imported for the interpreter."""
    if not torch.cuda.is_available():
        os.environ[INTERPRET] = "1"


def pytest_collection_finish() -> None:
    """Every kernel is imported by now. Servers that tests start from here on are plain CPU servers."""
    os.environ.pop(INTERPRET, None)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Without a GPU, make the machine under test Triton's interpreter for a module's tests."""
    if torch.cuda.is_available():
        yield
        return
    os.environ[INTERPRET] = "1"
    yield
    del os.environ[INTERPRET]
