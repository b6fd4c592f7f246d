"""The catalog: what there is, in which order, and what each path refuses."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from kernels.catalog import PATHS, path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import Reject, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Indexer, Values, any_flops, any_hbm_bytes, with_values
from qualification.evidence.shape_text import parse_attention_shape

ROOT = Path(__file__).parents[2]
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")
LAPTOP = Fingerprint(Device.CPU, "some CPU", None, None, None, None, "2.11.0", None)
PREFILL = AttentionShape(
    Phase.PREFILL, Dtype.BF16, Dtype.BF16, 32, 8, 128, Bucket.LE_2K, Bucket.LE_2K
)  # fmt: skip
EXTEND = replace(PREFILL, phase=Phase.EXTEND, context_bucket=Bucket.LE_32K, page_size=16)
DECODE = replace(EXTEND, phase=Phase.DECODE, query_bucket=Bucket.LE_128)


def serving(shape: AttentionShape, machine: Fingerprint) -> list[str]:
    return [path.name for path in PATHS if not path.rejects(shape, machine)]


HOPPER = "gluon.prefill.hopper"
WINDOW = "gluon.prefill.window.hopper"
BOTH = ("gluon.ordered.hopper", "triton.ordered")


def codes(name: str, shape: AttentionShape, machine: Fingerprint) -> list[Reject]:
    return [rejection.code for rejection in path_named(name).rejects(shape, machine)]


def test_only_pytorchs_own_choices_for_a_gpu_are_fallbacks() -> None:
    of_pytorch = {path.name for path in PATHS if path.name.startswith("sdpa.") and not path.name.startswith("sdpa.cpu")}
    assert {path.name for path in PATHS if path.tier is Tier.FALLBACK} == of_pytorch


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"expected one of gluon\.prefill\.hopper, .*sdpa\.math, .*, found 'sdpa\.best'"
    ):
        path_named("sdpa.best")


def test_each_phase_has_bundled_paths_and_fallbacks_on_a_gpu() -> None:
    fallbacks = ["sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math"]
    assert serving(PREFILL, H200) == ["gluon.prefill.hopper", "triton.prefill", *BOTH, *fallbacks]
    assert serving(EXTEND, H200) == ["gluon.extend.hopper", "triton.extend", *BOTH, *fallbacks[1:]]
    assert serving(DECODE, H200) == ["gluon.decode.hopper", "triton.decode", *BOTH, *fallbacks]


def test_a_cache_of_8_bits_has_paths_of_its_own() -> None:
    decode, extend = replace(DECODE, kv_dtype=FP8), replace(EXTEND, kv_dtype=FP8)
    triton = [f"triton.{phase}.fp8" for phase in ("decode", "extend")]
    assert serving(decode, H200) == ["gluon.decode.fp8.hopper", triton[0], "sdpa.math.fp8"]
    assert serving(extend, H200) == [triton[1], "sdpa.math.fp8"]
    assert serving(extend, replace(H200, sm=80)) == ["sdpa.math.fp8"]  # no conversions from e4m3


def test_values_that_are_numbers_of_the_keys_have_paths_of_their_own() -> None:
    for shape in (PREFILL, EXTEND, DECODE):
        latent = with_values(replace(shape, num_kv_heads=1, head_dim=576), Values(512, is_latent=True))
        assert serving(latent, H200) == ["triton.latent", "triton.latent.ordered", "sdpa.math.latent"]
        assert codes("triton.latent", shape, H200) == [Reject.LAYOUT]
        assert codes("triton.latent", with_values(latent, Values(520, is_latent=True)), H200) == [Reject.LAYOUT]
        assert parse_attention_shape(str(latent)) == latent
        assert any_flops(latent, 1, 100) * 2 * 576 == any_flops(replace(shape, head_dim=576), 1, 100) * (576 + 512)


def test_keys_that_an_indexer_chooses_have_paths_of_their_own() -> None:
    for shape, of_indexer in product((PREFILL, EXTEND, DECODE), ((64, 128), ())):
        every = Values(512, is_latent=True)
        values = every._replace(indexer=Indexer(2048, *of_indexer))
        dense, chosen = (with_values(replace(shape, num_kv_heads=1, head_dim=576), it) for it in (every, values))
        assert serving(chosen, H200) == ["triton.latent.indexed"]
        assert serving(dense, H200) == ["triton.latent", "triton.latent.ordered", "sdpa.math.latent"]
        assert parse_attention_shape(str(chosen)) == chosen
        for other in (replace(chosen, num_kv_heads=2), replace(chosen, values=values._replace(indexer=Indexer(2**15)))):
            assert codes("triton.latent.indexed", other, H200) == [Reject.LAYOUT]
        assert any_flops(chosen, 1, 4096) == any_flops(dense, 1, 2048) + (2 * 4096 * 64 * 128 if of_indexer else 0)


def test_values_narrower_than_keys_have_paths_of_their_own() -> None:
    for shape in (PREFILL, EXTEND, DECODE):
        wide = replace(shape, head_dim=192)
        narrow = with_values(wide, Values(128))
        assert serving(narrow, H200) == ["triton.asymmetric", "sdpa.math.asymmetric"]
        for path, other in (("triton.asymmetric", wide), ("triton.asymmetric", with_values(wide, Values(200))),
                            ("triton.asymmetric", with_values(wide, Values(128, is_latent=True))),
                            ("triton.latent", narrow), (f"triton.{shape.phase.value}", narrow)):  # fmt: skip
            assert codes(path, other, H200) == [Reject.LAYOUT]
        assert parse_attention_shape(str(narrow)) == narrow
        assert any_flops(narrow, 1, 100) * 2 * 192 == any_flops(wide, 1, 100) * (192 + 128)
        assert any_hbm_bytes(narrow, 1, 100)[0] * 2 * 192 == any_hbm_bytes(wide, 1, 100)[0] * (192 + 128)


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_the_hopper_paths_are_for_hopper_only(sm: int) -> None:
    for shape in (PREFILL, EXTEND, DECODE):
        phase = shape.phase.value
        assert codes(f"gluon.{phase}.hopper", shape, replace(H200, sm=sm)) == [Reject.ARCH]
        assert serving(shape, replace(H200, sm=sm))[0] == f"triton.{phase}"


def test_heads_of_512_have_paths_of_their_own_and_a_little_less_has_none() -> None:
    for shape in (PREFILL, EXTEND, DECODE):
        phase, wide = shape.phase.value, replace(shape, head_dim=512)
        assert serving(wide, H200)[:2] == [f"gluon.{phase}.wide.hopper", f"triton.{phase}.wide"]
        assert serving(replace(wide, mask=Mask.SPANS), H200)[0] == f"triton.{phase}.wide"
        assert serving(wide, replace(H200, sm=100))[0] == f"triton.{phase}.wide"
        assert not any("gluon" in name or "triton" in name for name in serving(replace(shape, head_dim=504), H200))


@pytest.mark.parametrize(("page_size", "expected"), [(8, [Reject.PAGE_SIZE]), (24, [Reject.PAGE_SIZE]), (48, [])])
def test_the_hopper_path_copies_pages_in_boxes_of_16_keys(page_size: int, expected: list[Reject]) -> None:
    for shape in (EXTEND, DECODE):
        assert codes(f"gluon.{shape.phase.value}.hopper", replace(shape, page_size=page_size), H200) == expected


@pytest.mark.parametrize("mask", [Mask.SPANS, Mask.FULL])
def test_decode_with_other_masks_is_left_to_triton(mask: Mask) -> None:
    shape = replace(DECODE, mask=mask)
    assert codes("gluon.decode.hopper", shape, H200) == [Reject.MASK]
    assert serving(shape, H200)[0] == "triton.decode"


@pytest.mark.parametrize("shape", [PREFILL, EXTEND, DECODE])
def test_a_laptop_is_served_by_torch_for_cpus(shape: AttentionShape) -> None:
    assert serving(shape, LAPTOP) == ["sdpa.cpu", "sdpa.math", "torch.attention.tiles"]


@pytest.mark.parametrize("shape", [PREFILL, EXTEND, DECODE])
@pytest.mark.parametrize("machine", [H200, LAPTOP])
def test_a_head_dim_of_320_is_served_by_a_fallback_only(shape: AttentionShape, machine: Fingerprint) -> None:
    wide = replace(shape, head_dim=320)
    expected = ["sdpa.math", "torch.attention.tiles"] if machine is LAPTOP else ["sdpa.efficient", "sdpa.math"]
    assert serving(wide, machine) == expected
    first = "sdpa.cpu" if machine is LAPTOP else f"triton.{shape.phase.value}"
    assert codes(first, wide, machine) == [Reject.HEAD_DIM]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window": 128}, [HOPPER, WINDOW, "triton.prefill", *BOTH, "sdpa.efficient", "sdpa.math"]),
        ({"window": 100, "sinks": True, "head_dim": 64}, [HOPPER, WINDOW, "triton.prefill", *BOTH, "sdpa.math"]),
        ({"window": 128, "num_kv_heads": 32}, [HOPPER, "triton.prefill", *BOTH, "sdpa.efficient", "sdpa.math"]),
        ({"window": 128, "softcap": 30.0}, [HOPPER, "triton.prefill", *BOTH, "sdpa.math"]),
        ({"window": 512}, [HOPPER, "triton.prefill", *BOTH, "sdpa.efficient", "sdpa.math"]),
        ({"softcap": 30.0}, [HOPPER, "triton.prefill", *BOTH, "sdpa.math"]),
        ({"sinks": True}, [HOPPER, "triton.prefill", *BOTH, "sdpa.math"]),
        ({"mask": Mask.SPANS}, [HOPPER, "triton.prefill", *BOTH, "sdpa.efficient", "sdpa.math"]),
        (
            {"mask": Mask.FULL},
            [
                "gluon.prefill.unmasked.hopper",
                "triton.prefill",
                BOTH[1],
                "sdpa.cudnn",
                "sdpa.flash",
                "sdpa.efficient",
                "sdpa.math",
            ],
        ),
        ({"head_dim": 256}, [HOPPER, "triton.prefill", *BOTH, "sdpa.flash", "sdpa.efficient", "sdpa.math"]),
        ({"head_dim": 100}, ["triton.prefill", BOTH[1], "sdpa.flash", "sdpa.math"]),
        ({"dtype": Dtype.FP32, "kv_dtype": Dtype.FP32}, ["triton.prefill", BOTH[1], "sdpa.efficient", "sdpa.math"]),
    ],
)
def test_flags_and_dims_leave_the_paths_that_can_compute_them(changes: dict[str, object], expected: list[str]) -> None:
    assert serving(replace(PREFILL, **changes), H200) == expected  # type: ignore[arg-type]


def test_profiler_names_of_triton_paths_are_jit_functions() -> None:
    for phase in PLANNED_PHASES:
        tree = ast.parse((ROOT / f"kernels/portable/{phase.value}.py").read_text())
        kernels = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
        names = path_named(f"triton.{phase.value}").kernel_names
        assert kernels
        assert all(any(name in kernel for name in names) for kernel in kernels)


def test_without_triton_its_paths_reject_with_a_reason() -> None:
    program = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from kernels.catalog import PATHS
from kernels.system.device import read_fingerprint
machine = read_fingerprint(torch.device("cpu"))
print(machine.triton, *[path.name for path in PATHS if (path.run is None) is not path.limits.needs_triton])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "None\n"  # all of them, and no others
    for path, shape in ((HOPPER, PREFILL), ("gluon.extend.hopper", EXTEND), ("triton.prefill", PREFILL)):
        assert codes(path, shape, replace(H200, triton=None)) == [Reject.ARCH]
