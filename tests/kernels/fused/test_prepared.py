"""The host's part of a fused op on a GPU: the kernel that it finds, and the arguments that it passes."""

from typing import Any

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return dict(run_outside("prepared_launch.py"))


@pytest.mark.parametrize(
    "op", ["norm", "norms around a sum", "swiglu", "rope", "gated sum", "norm and gate", "routes", "unaligned norm"]
)
def test_an_op_compiles_one_kernel_and_hands_over_what_it_takes(seen: dict[str, Any], op: str) -> None:
    found = seen["ops"][op]
    assert (found["compiled"], found["launches"]) == (1, 2)
    assert found["arguments"][0] == found["arguments"][1]


def test_tritons_binder_finds_the_same_kernels(seen: dict[str, Any]) -> None:
    assert seen["found_by_the_binder"]
