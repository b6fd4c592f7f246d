"""Every attention path there is, in the order of preference, with its limits as data."""

import hashlib
from pathlib import Path

from kernels import launch
from kernels.attention import sdpa
from kernels.fingerprint import Device
from kernels.path import KernelPath, Limits, RunAttention, Tier
from kernels.shape import Dtype, Mask, Phase

_ATTENTION = Path(__file__).parent / "attention"
_TRITON_SOURCES = ("batch.py", "tiles.py", "triton_tile.py")
_GLUON_SOURCES = (  # of prefill and extend: the consumers are the same, and so are the tensor maps
    "../launch.py",
    "batch.py",
    "gluon_variants.py",
    "gluon_schedule.py",
    "gluon_softmax.py",
    "gluon_pipeline.py",
    "gluon_store.py",
    "gluon_blocks.py",
    "gluon_ahead.py",
    "gluon_consumer.py",
    "gluon_calls.py",
    "gluon_launch.py",
)
_GLUON_PREFILL_SOURCES = (*_GLUON_SOURCES, "gluon_prefill.py", "gluon_prefill_launch.py")
_GLUON_EXTEND_SOURCES = (
    *_GLUON_SOURCES,
    "gluon_extend_variants.py",
    "gluon_extend_producer.py",
    "gluon_extend_plan.py",
    "gluon_extend_combine.py",
    "gluon_extend_work.py",
    "gluon_extend.py",
    "gluon_extend_launch.py",
)
_GLUON_DECODE_SOURCES = (
    "../launch.py",
    "batch.py",
    "gluon_variants.py",
    "gluon_decode_variants.py",
    "gluon_decode_shares.py",
    "gluon_decode_stream.py",
    "gluon_decode.py",
    "gluon_decode_exchange.py",
    "gluon_decode_cluster.py",
    "../fused/cluster.py",
    "gluon_calls.py",
    "gluon_decode_launch.py",
)
_SDPA_SOURCES = ("batch.py", "sequences.py", "sdpa.py", "sdpa_decode.py", "bags.py")

_DECODE_ALTERNATIVES = (
    ("hallmark_gluon_decode", "hallmark_gluon_decode_combine"),
    ("hallmark_gluon_decode_cluster",),  # of one sequence
)
_FEW_QUERIES = 8  # drafted tokens of a sequence and the one before, verified together
_ALL_DTYPES = frozenset(Dtype)
_HALF_DTYPES = frozenset({Dtype.FP16, Dtype.BF16})
_ALL_PHASES = frozenset(Phase)
_ALL_MASKS = frozenset(Mask)
_NO_SPANS = frozenset({Mask.CAUSAL, Mask.FULL})

# What PyTorch launches around an SDPA kernel: gathers, casts, masks, copies. None of them multiplies matrices, so that
# a silent switch to the math backend shows as a GEMM whose name is not among these.
_TORCH_HELPERS = ("at::native", "Memcpy", "Memset")
_GEMMS = ("nvjet", "xmma", "cutlass_", "gemm", "gemv", "bmm", "cublas", "splitK")


def _digest(*names: str) -> str:
    """sha256 over the source files that make a path."""
    digest = hashlib.sha256()
    for name in names:
        content = (_ATTENTION / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _triton_path(phase: Phase, run: RunAttention | None, *kernel_names: str) -> KernelPath:
    """A Triton path serves one phase, on any GPU since Ampere."""
    limits = Limits(
        devices=frozenset({Device.CUDA, Device.INTERPRETER}),
        phases=frozenset({phase}),
        dtypes=_ALL_DTYPES,
        max_head_dim=256,
        min_sm=80,
        masks=_ALL_MASKS,
        needs_triton=True,
    )
    digest = _digest(*_TRITON_SOURCES, f"triton_{phase.value}.py")
    # Its grid is a function of host bounds; what lies in them is read on the device.
    return KernelPath(f"triton.{phase.value}", Tier.FIRST, limits, digest, kernel_names, run, is_capturable=True)


def _hopper_path(phase: Phase, run: RunAttention | None) -> KernelPath:
    """By TMA and, but for decode, wgmma, which ends with sm_90. Every tensor map wants rows of whole 16 bytes."""
    limits = Limits(
        devices=frozenset({Device.CUDA}),
        phases=frozenset({phase}),
        dtypes=_HALF_DTYPES,
        max_head_dim=256,
        head_dim_multiple=8,
        min_sm=90,
        max_sm=90,
        page_size_multiple=16,
        masks=frozenset({Mask.CAUSAL} if phase is Phase.DECODE else {Mask.CAUSAL, Mask.SPANS}),
        needs_triton=True,
    )
    names, sources = {
        Phase.PREFILL: (("hallmark_gluon_prefill", "hallmark_gluon_plan"), _GLUON_PREFILL_SOURCES),
        Phase.EXTEND: (("hallmark_gluon_extend",), _GLUON_EXTEND_SOURCES),
        Phase.DECODE: (("hallmark_gluon_decode",), _GLUON_DECODE_SOURCES),
    }[phase]
    # Plans are made on the device, and the last program to ask for a tile sets their counter back; decode needs none.
    return KernelPath(
        f"gluon.{phase.value}.hopper", Tier.FIRST, limits, _digest(*sources), names, run, is_capturable=True,
        max_queries=_FEW_QUERIES if phase is Phase.DECODE else 1,
        alternatives=_DECODE_ALTERNATIVES if phase is Phase.DECODE else (),
    )  # fmt: skip


def _sdpa_path(
    name: str,
    tier: Tier,
    limits: Limits,
    run: RunAttention,
    *kernel_names: str,
    competes_on: frozenset[Device] = frozenset(),
) -> KernelPath:
    digest = _digest(*_SDPA_SOURCES)
    return KernelPath(f"sdpa.{name}", tier, limits, digest, kernel_names, run, competes_on=competes_on)


def _bundled_paths() -> tuple[KernelPath, ...]:
    """The Gluon and Triton paths; without Triton they stay in the catalog, to say why they cannot run."""
    if launch.triton_version() is None:
        return (
            *(_hopper_path(phase, None) for phase in Phase),
            *(_triton_path(phase, None, f"hallmark_{phase.value}") for phase in Phase),
        )
    from kernels.attention.gluon_decode_launch import run_decode as run_hopper_decode
    from kernels.attention.gluon_extend_launch import run_extend as run_hopper_extend
    from kernels.attention.gluon_prefill_launch import run_prefill as run_hopper_prefill
    from kernels.attention.triton_decode import run_decode
    from kernels.attention.triton_extend import run_extend
    from kernels.attention.triton_prefill import run_prefill

    return (
        _hopper_path(Phase.PREFILL, run_hopper_prefill),
        _hopper_path(Phase.EXTEND, run_hopper_extend),
        _hopper_path(Phase.DECODE, run_hopper_decode),
        _triton_path(Phase.PREFILL, run_prefill, "hallmark_prefill"),
        _triton_path(Phase.EXTEND, run_extend, "hallmark_extend"),
        _triton_path(Phase.DECODE, run_decode, "hallmark_decode"),
    )


# Nobody has proven torch's CPU attention beyond 256: larger head dims are a visible fallback on a laptop too.
_CPU_LIMITS = Limits(
    devices=frozenset({Device.CPU}),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=256,
    softcap=False,  # torch's SDPA has no word for it
    sinks=False,  # nor for them
    masks=_ALL_MASKS,
)
_CUDNN_LIMITS = Limits(
    devices=frozenset({Device.CUDA}),
    phases=frozenset({Phase.PREFILL, Phase.DECODE}),  # its causal mask is square: a chunk after a context is not
    dtypes=_HALF_DTYPES,
    max_head_dim=128,  # torch refuses more: 192 and 256 need newer cuDNN
    head_dim_multiple=8,
    min_sm=80,
    window=False,
    softcap=False,
    sinks=False,
    masks=_NO_SPANS,
)
_FLASH_LIMITS = Limits(
    devices=frozenset({Device.CUDA}),
    phases=_ALL_PHASES,
    dtypes=_HALF_DTYPES,
    max_head_dim=256,
    min_sm=80,
    window=False,  # takes no mask but the causal one
    softcap=False,
    sinks=False,
    masks=_NO_SPANS,
)
_EFFICIENT_LIMITS = Limits(
    devices=frozenset({Device.CUDA}),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=1024,
    head_dim_multiple=8,
    min_sm=80,
    softcap=False,
    sinks=False,
    masks=_ALL_MASKS,
)
_MATH_LIMITS = Limits(
    devices=frozenset(Device),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=1024,
    masks=_ALL_MASKS,
)

# In the order of preference: what we want to serve, then what we serve when we cannot, each path named in metrics.
PATHS: tuple[KernelPath, ...] = (
    *_bundled_paths(),
    _sdpa_path(
        "cpu",
        Tier.FIRST,
        _CPU_LIMITS,
        sdpa.run_cpu,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_embedding_bag",
        "aten::_softmax",
    ),
    _sdpa_path("cudnn", Tier.FALLBACK, _CUDNN_LIMITS, sdpa.run_cudnn, "cudnn", *_TORCH_HELPERS),
    _sdpa_path("flash", Tier.FALLBACK, _FLASH_LIMITS, sdpa.run_flash, "pytorch_flash::", *_TORCH_HELPERS),
    _sdpa_path("efficient", Tier.FALLBACK, _EFFICIENT_LIMITS, sdpa.run_efficient, "fmha_cutlassF", *_TORCH_HELPERS),
    _sdpa_path(
        "math",
        Tier.FALLBACK,
        _MATH_LIMITS,
        sdpa.run_math,
        *_GEMMS,
        "softmax",
        *_TORCH_HELPERS,
        # Both paths of a CPU are PyTorch's own. On a GPU nothing of PyTorch serves uncounted.
        competes_on=frozenset({Device.CPU}),
    ),
)


def path_named(name: str) -> KernelPath:
    """The path of that name. Raises ValueError, naming those there are, for another."""
    for path in PATHS:
        if path.name == name:
            return path
    raise ValueError(f"expected one of {', '.join(path.name for path in PATHS)}, found {name!r}")
