"""Kernel tests run in Triton's interpreter, or on the GPU where there is one."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _interpreted(interpreter: None) -> None:
    """Every module's tests of this folder."""


@pytest.fixture(scope="session")
def _hopper() -> None:
    """Skip a test where there is no sm_90 GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


@pytest.fixture
def device() -> torch.device:
    """Device on which Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
