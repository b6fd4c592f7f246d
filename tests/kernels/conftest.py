"""Kernel tests run in Triton's interpreter, or on the GPU where there is one."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _interpreted(interpreter: None) -> None:
    """Every module's tests of this folder."""


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
