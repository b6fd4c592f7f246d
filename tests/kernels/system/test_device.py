"""Reading the machine, and counting what Triton compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from kernels.calls.launch import install_compile_counter, num_compiles
from kernels.calls.processors import num_processors, shared_bytes
from kernels.functional import attention_varlen
from kernels.system.device import dtype_of, read_fingerprint, torch_dtype
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.shape import Dtype

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_dtype_survives_the_way_to_torch_and_back(dtype: Dtype) -> None:
    assert dtype_of(torch_dtype(dtype)) is dtype
    assert torch_dtype(dtype).itemsize == dtype.num_bytes


def test_a_dtype_no_path_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of fp32, fp16, bf16, fp8, found torch\.int8"):
        dtype_of(torch.int8)


@needs_no_gpu
def test_the_processor_is_the_interpreter_while_triton_says_so() -> None:
    assert read_fingerprint(CPU).device is Device.INTERPRETER
    del os.environ["TRITON_INTERPRET"]
    try:
        assert read_fingerprint(CPU).device is Device.CPU
    finally:
        os.environ["TRITON_INTERPRET"] = "1"


def test_a_processor_has_a_name_and_versions_and_no_gpu_fields() -> None:
    found = read_fingerprint(CPU)
    assert found.gpu
    assert found.torch == torch.__version__
    assert found.triton == triton.__version__
    assert (found.sm, found.driver, found.cudnn) == (None, None, None)


def test_another_number_of_threads_is_another_fingerprint() -> None:
    before, num_threads = read_fingerprint(CPU), torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        after = read_fingerprint(CPU)
    finally:
        torch.set_num_threads(num_threads)
    assert before.differing_fields(after) == ("threads",)
    assert after.threads == num_threads + 1
    assert read_fingerprint(CPU) == before == read_fingerprint(CPU, num_threads=num_threads)


def test_matmuls_of_lower_precision_are_another_fingerprint() -> None:
    before, precision = read_fingerprint(CPU), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert read_fingerprint(CPU).libraries == "float32_matmul=medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert read_fingerprint(CPU) == before


def test_library_settings_are_part_of_a_cpus_fingerprint() -> None:
    """Read them in a process of its own: libraries do so once, at their start."""
    assert read_fingerprint(CPU).instruction_set == torch.backends.cpu.get_cpu_capability()
    variables = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    program = (
        "import torch; from kernels.system.device import read_fingerprint; it = read_fingerprint(torch.device('cpu'));"
        "print(it.instruction_set, it.libraries)"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, check=True)
    instruction_set, libraries = ran.stdout.split(maxsplit=1)
    assert instruction_set == "DEFAULT"
    assert "MKL_CBWR=COMPATIBLE" in libraries
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in libraries


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a cpu or cuda device, found meta"):
        read_fingerprint(torch.device("meta"))


def test_the_interpreter_has_no_shared_memory_limit() -> None:
    assert shared_bytes(CPU) is None
    assert num_processors(CPU) == 4


def test_compiles_are_counted_beside_an_earlier_listener() -> None:
    compilation = triton.knobs.compilation
    before = compilation.listener
    seen: list[str] = []
    try:
        compilation.listener = lambda **compiled: seen.append(compiled["src"])
        assert num_compiles() == 0
        install_compile_counter()
        install_compile_counter()  # a second time changes nothing
        compilation.listener(src="a")
        compilation.listener(src="b")
        assert num_compiles() == 2
        assert seen == ["a", "b"]
    finally:
        compilation.listener = before


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["gluon.prefill.hopper", "triton.prefill"])
def test_a_counted_compile_does_not_disturb_the_launch(path: str) -> None:
    """A hook of Triton's after a compile made the first launch of a Gluon kernel raise TypeError."""
    compilation = triton.knobs.compilation
    before = compilation.listener
    q = torch.randn(5, 4, 104, device="cuda", dtype=torch.bfloat16)  # a head dim that no other test has compiled
    ends = torch.tensor([0, 5], device="cuda", dtype=torch.int32)
    try:
        install_compile_counter()
        out = attention_varlen(q, q, q, ends, ends, 5, 5, path=path)
        assert num_compiles() >= 1
    finally:
        compilation.listener = before
    torch.testing.assert_close(out[0], q[0])  # the first query sees its own key only
