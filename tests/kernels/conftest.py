"""Kernel tests run in Triton's interpreter, or on the GPU where there is one."""

from typing import Any

import numpy as np
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


@pytest.fixture
def rows_of_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum a row of a product in fp64: in fp32 NumPy's BLAS sums rows of a tile in other orders, on some processors."""
    from triton.runtime import interpreter

    def create_dot(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
