"""The machine as data."""

from dataclasses import replace

from kernels.vocabulary.fingerprint import Device, Fingerprint

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")


def test_equal_machines_differ_in_nothing() -> None:
    assert H200.differing_fields(replace(H200)) == ()


def test_the_differing_fields_are_named_in_order() -> None:
    other = replace(H200, torch="2.12.0", driver="590.1", sm=100)
    assert H200.differing_fields(other) == ("sm", "driver", "torch")


def test_the_text_names_every_field() -> None:
    assert str(H200) == (
        "device=cuda gpu=NVIDIA H200 sm=90 driver=580.95.05 cuda=13.0 cudnn=91900 torch=2.11.0 triton=3.6.0"
    )


def test_a_cpu_is_also_its_instructions_libraries_and_threads() -> None:
    cpu = Fingerprint(Device.CPU, "a CPU", None, None, None, None, "2.13.0", None, "AVX512", "default", 2)
    assert str(cpu).endswith("triton=None instruction_set=AVX512 libraries=default threads=2")
    slower = replace(cpu, instruction_set="AVX2", libraries="MKL_CBWR=AVX2", threads=1)
    assert cpu.differing_fields(slower) == ("instruction_set", "libraries", "threads")
