"""The machine code of the Triton kernels of the experts, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

SHARED_BYTES = 232_448  # that one program may have on an H100 or H200


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Facts of the compiled kernels, by name."""
    found: dict[str, dict[str, int]] = run_outside("experts_compile.py")
    return found


def test_no_kernel_spills_and_all_fit_a_multiprocessor(compiled: dict[str, dict[str, int]]) -> None:
    assert {name: kernel["spills"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES and kernel["registers"] <= 255 for kernel in compiled.values())


def test_no_sum_or_place_is_decided_by_an_atomic(compiled: dict[str, dict[str, int]]) -> None:
    assert {name: kernel["global_atomics"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)


def test_products_multiply_on_tensor_cores(compiled: dict[str, dict[str, int]]) -> None:
    few = [kernel for name, kernel in compiled.items() if name.endswith(", 1 tokens")]
    more = [kernel for name, kernel in compiled.items() if name.endswith(", 8192 tokens")]
    assert (len(few), len(more)) == (4, 6)
    assert all(kernel["mma"] for kernel in few)
    assert all(kernel["wgmma"] for kernel in more)


def test_programs_of_few_tokens_share_a_multiprocessor(compiled: dict[str, dict[str, int]]) -> None:
    """Memory bounds them: what one waits for another loads meanwhile, 16 bytes a thread."""
    few = [kernel for name, kernel in compiled.items() if name.endswith(", 1 tokens")]
    assert all(3 * kernel["shared_bytes"] <= SHARED_BYTES for kernel in few)
    assert all(kernel["wide_copies"] for kernel in few)


def test_products_copy_weights_by_tma_and_gather_rows_by_16(compiled: dict[str, dict[str, int]]) -> None:
    gluon = {name: kernel for name, kernel in compiled.items() if name.startswith("gluon")}
    assert len(gluon) == 24
    assert all(kernel["tma_loads"] and kernel["wgmma"] for kernel in gluon.values())
    gathering = {name for name, kernel in gluon.items() if kernel["wide_copies"]}
    assert gathering == {name for name in gluon if "gate up" in name and "1 rows" not in name}


def test_few_tokens_read_mxfp4_weights_16_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    few = [kernel for name, kernel in compiled.items() if name.endswith("mxfp4, few tokens")]
    assert len(few) == 2
    assert all(kernel["wide_loads"] >= 12 for kernel in few)


def test_codes_become_numbers_while_others_are_multiplied(compiled: dict[str, dict[str, int]]) -> None:
    """ptxas would wait for each wgmma where registers were too few."""
    codes = {name: kernel for name, kernel in compiled.items() if name.startswith("codes")}
    assert len(codes) == 24
    assert all(kernel["tma_loads"] and kernel["wgmma"] for kernel in codes.values())
    assert not any(kernel["wgmma_hazards"] for kernel in codes.values())
    assert all(kernel["wgmma_waits"] < kernel["wgmma"] for kernel in codes.values())
