"""Refusals from limits as data."""

from dataclasses import replace

import pytest

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import KernelPath, Limits, Reject, Tier
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")
LIMITS = Limits(
    devices=frozenset({Device.CUDA, Device.INTERPRETER}),
    phases=frozenset({Phase.EXTEND}),
    dtypes=frozenset({Dtype.BF16, Dtype.FP16}),
    max_head_dim=128,
    head_dim_multiple=8,
    min_sm=80,
    page_size_multiple=16,
    window=False,
    softcap=False,
    sinks=False,
    masks=frozenset({Mask.CAUSAL, Mask.FULL}),
    max_context=Bucket.LE_32K,
    needs_triton=True,
)
SHAPE = AttentionShape(
    Phase.EXTEND, Dtype.BF16, Dtype.BF16, 32, 8, 128, Bucket.LE_512, Bucket.LE_32K, page_size=16
)  # fmt: skip


def path(limits: Limits = LIMITS) -> KernelPath:
    return KernelPath("some.path", Tier.FIRST, limits, "0" * 64, ("some_kernel",), None)


def test_a_path_does_not_reject_what_is_at_its_limits() -> None:
    assert path().rejects(SHAPE, H200) == ()


@pytest.mark.parametrize(
    ("changes", "code", "detail"),
    [
        ({"phase": Phase.DECODE}, Reject.LAYOUT, "does not serve decode"),
        ({"dtype": Dtype.FP32, "kv_dtype": Dtype.FP32}, Reject.DTYPE, "takes bf16, fp16, the shape has fp32"),
        ({"kv_dtype": Dtype.FP32}, Reject.DTYPE, "takes keys in bf16, fp16, the shape has fp32"),
        ({"head_dim": 136}, Reject.HEAD_DIM, "takes at most 128, the shape has 136"),
        ({"head_dim": 100}, Reject.HEAD_DIM, "takes multiples of 8, the shape has 100"),
        ({"page_size": 24}, Reject.PAGE_SIZE, "takes multiples of 16, the shape has 24"),
        ({"window": 512}, Reject.WINDOW, "takes no window, the shape has 512"),
        ({"softcap": 30.0}, Reject.SOFTCAP, "takes no softcap, the shape has 30"),
        ({"sinks": True}, Reject.SINKS, "takes no sinks"),
        ({"mask": Mask.SPANS}, Reject.MASK, "takes causal, full, the shape has spans"),
        (
            {"context_bucket": Bucket.LE_128K},
            Reject.LENGTH,
            "takes at most 32768 tokens of context, the shape is le_128k",
        ),
        ({"device": Device.CPU}, Reject.ARCH, "runs on cuda or interpreter, this machine is cpu"),
        ({"sm": 75}, Reject.ARCH, "needs sm_80, this GPU is sm_75"),
        ({"triton": None}, Reject.ARCH, "needs triton, which is not installed here (it exists for Linux only)"),
    ],
)
def test_each_limit_has_its_code_and_names_limit_and_value(
    changes: dict[str, object], code: Reject, detail: str
) -> None:
    of_machine = {name: value for name, value in changes.items() if hasattr(H200, name) and not hasattr(SHAPE, name)}
    of_shape = {name: value for name, value in changes.items() if name not in of_machine}
    (rejection,) = path().rejects(replace(SHAPE, **of_shape), replace(H200, **of_machine))  # type: ignore[arg-type]
    assert (rejection.code, rejection.detail) == (code, detail)


def test_bf16_is_refused_in_the_interpreter_where_it_is_garbage() -> None:
    machine = replace(H200, device=Device.INTERPRETER, sm=None)
    (rejection,) = path().rejects(SHAPE, machine)
    assert rejection.code is Reject.DTYPE
    assert path().rejects(replace(SHAPE, dtype=Dtype.FP16, kv_dtype=Dtype.FP16), machine) == ()


def test_keys_may_have_dtypes_of_their_own() -> None:
    limits = replace(LIMITS, kv_dtypes=frozenset({Dtype.FP16}))
    (rejection,) = path(limits).rejects(SHAPE, H200)
    assert rejection.detail == "takes keys in fp16, the shape has bf16"
    assert path(limits).rejects(replace(SHAPE, kv_dtype=Dtype.FP16), H200) == ()


def test_every_reason_is_given_at_once() -> None:
    shape = replace(SHAPE, head_dim=256, window=8, sinks=True)
    codes = [rejection.code for rejection in path().rejects(shape, replace(H200, sm=75))]
    assert codes == [Reject.ARCH, Reject.HEAD_DIM, Reject.WINDOW, Reject.SINKS]
