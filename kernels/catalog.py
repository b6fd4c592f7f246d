"""Every path of attention there is, in the order of preference, with its limits as data; and those of all operators."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kernels.asymmetric.eager import run_asymmetric_cpu, run_asymmetric_math, run_asymmetric_tiles
from kernels.calls import launch
from kernels.collective.paths import COLLECTIVE_PATHS, collective_paths_on
from kernels.convolution.paths import CONVOLUTION_PATHS
from kernels.experts.paths import EXPERTS_PATHS
from kernels.fp8_cache import widened
from kernels.fp8_cache.pages import HEAD_DIM_MULTIPLE
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import GEMMS, TORCH_HELPERS
from kernels.indexed.eager import run_indexed_cpu
from kernels.indexed.tiles import run_indexed_tiles
from kernels.latent.eager import run_latent_cpu, run_latent_math
from kernels.latent.tiles import run_latent_tiles
from kernels.linear.paths import LINEAR_PATHS, linear_paths_on
from kernels.recurrence.paths import RECURRENCE_PATHS
from kernels.sdpa import backends as sdpa
from kernels.sdpa.key_tiles import run_attention_tiles
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import AnyPath, KernelPath, Limits, RunAttention, Tier
from kernels.vocabulary.path_order import competes_on, tier_of
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Indexer, Values

if TYPE_CHECKING:
    import torch

PathT = TypeVar("PathT", bound=AnyPath)

_DECODE_ALTERNATIVES = (
    ("hallmark_gluon_decode", "hallmark_gluon_decode_combine"),
    ("hallmark_gluon_decode_cluster",),  # of one sequence
)
_FEW_QUERIES = 8  # drafted tokens of a sequence and the one before, verified together
_ALL_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_HALF_DTYPES = frozenset({Dtype.FP16, Dtype.BF16})
_PLANNED_PHASES = frozenset(PLANNED_PHASES)
_ALL_PHASES = frozenset({Phase.PREFILL, Phase.EXTEND, Phase.DECODE, Phase.VERIFY})
_ALL_MASKS = frozenset(Mask)
_NO_SPANS = frozenset({Mask.CAUSAL, Mask.FULL})

_INDEXER = Indexer(num_keys=2**14, heads=128, dim=256)  # the largest that chooses keys for a path

_TRITON_LIMITS = Limits(  # of a path on any GPU since Ampere
    devices=frozenset({Device.CUDA, Device.INTERPRETER}),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=256,
    min_sm=80,
    masks=_ALL_MASKS,
    needs_triton=True,
)
_TRITON_LATENT_LIMITS = replace(_TRITON_LIMITS, max_head_dim=576, max_values=Values(512, is_latent=True))
_HOPPER_LIMITS = Limits(  # of sm_90 alone (TMA, wgmma), and tensor maps with rows of whole 16 bytes
    devices=frozenset({Device.CUDA}),
    phases=_ALL_PHASES,
    dtypes=_HALF_DTYPES,
    max_head_dim=256,
    head_dim_multiple=8,
    min_sm=90,
    max_sm=90,
    page_size_multiple=16,
    needs_triton=True,
)


def _digest(entry: str) -> str:
    """Return the digest of the module that holds a path's `run` and of its import closure within kernels/."""
    return SOURCES.of(f"kernels.{entry}")


def _phases_of(phase: Phase) -> frozenset[Phase]:
    """Return the phases that a kernel made for one computes: drafted tokens are a chunk to it."""
    return frozenset({Phase.EXTEND, Phase.VERIFY} if phase is Phase.EXTEND else {phase})


def _triton_path(phase: Phase, run: RunAttention | None, *kernel_names: str) -> KernelPath:
    """Return the Triton path of one phase for heads of up to 256 dimensions."""
    limits = replace(_TRITON_LIMITS, phases=_phases_of(phase))
    digest = _digest(f"portable.{phase.value}")
    # Its grid is a function of host bounds; what lies in them is read on the device.
    return KernelPath(f"triton.{phase.value}", Tier.FIRST, limits, digest, kernel_names, run, is_capturable=True)


def _wide_triton_path(phase: Phase, run: RunAttention | None, *kernel_names: str) -> KernelPath:
    """Return the Triton path for heads of 512 dimensions, those of Gemma 4's layers without a window."""
    # No other multiple: heads between are padded to it, and read twice as much for less.
    limits = replace(_TRITON_LIMITS, phases=_phases_of(phase), max_head_dim=512, head_dim_multiple=512)
    name = f"triton.{phase.value}.wide"
    return KernelPath(name, Tier.FIRST, limits, _digest("portable.wide"), kernel_names, run, is_capturable=True)


def _fp8_triton_path(phase: Phase, run: RunAttention | None, *kernel_names: str) -> KernelPath:
    """Return the Triton path over a cache of 8 bits: conversions to and from e4m3 are there since Ada (sm_89)."""
    limits = replace(
        _TRITON_LIMITS,
        phases=_phases_of(phase),
        head_dim_multiple=HEAD_DIM_MULTIPLE,
        min_sm=89,
        kv_dtypes=frozenset({FP8}),
    )
    name = f"triton.{phase.value}.fp8"
    digest = _digest(f"fp8_cache.{phase.value}")
    return KernelPath(name, Tier.FIRST, limits, digest, kernel_names, run, is_capturable=True)


def _fp8_hopper_path(run: RunAttention | None) -> KernelPath:
    """Return the Gluon path of decode over a cache of 8 bits."""
    limits = replace(_HOPPER_LIMITS, phases=frozenset({Phase.DECODE}), head_dim_multiple=16, kv_dtypes=frozenset({FP8}))
    return KernelPath(
        "gluon.decode.fp8.hopper", Tier.FIRST, limits, _digest("fp8_cache.hopper.launch"),
        ("hallmark_gluon_decode_fp8", "hallmark_gluon_decode_combine"), run, is_capturable=True,
        max_queries=_FEW_QUERIES,
    )  # fmt: skip


def _hopper_path(phase: Phase, run: RunAttention | None) -> KernelPath:
    """Return the Gluon path of one phase for heads of up to 256 dimensions."""
    masks = frozenset({Mask.CAUSAL} if phase is Phase.DECODE else {Mask.CAUSAL, Mask.SPANS})
    limits = replace(_HOPPER_LIMITS, phases=_phases_of(phase), masks=masks)
    names = {
        Phase.PREFILL: ("hallmark_gluon_prefill", "hallmark_gluon_plan"),
        Phase.EXTEND: ("hallmark_gluon_extend",),
        Phase.DECODE: ("hallmark_gluon_decode",),
    }[phase]
    # Plans are made on the device, and the last program to ask for a tile sets their counter back; decode needs none.
    return KernelPath(
        f"gluon.{phase.value}.hopper", Tier.FIRST, limits, _digest(f"hopper.{phase.value}.launch"), names, run,
        is_capturable=True,
        max_queries=_FEW_QUERIES if phase is Phase.DECODE else 1,
        alternatives=_DECODE_ALTERNATIVES if phase is Phase.DECODE else (),
    )  # fmt: skip


def _wide_hopper_path(phase: Phase, run: RunAttention | None) -> KernelPath:
    """Return the Gluon path for heads of 512 dimensions: two consumers have half of the output's columns each."""
    limits = replace(
        _HOPPER_LIMITS,
        phases=_phases_of(phase),
        max_head_dim=512,
        head_dim_multiple=512,
        window=False,
        softcap=False,
        sinks=False,
    )
    names = {
        Phase.PREFILL: ("hallmark_gluon_wide_prefill", "hallmark_gluon_plan"),
        Phase.EXTEND: ("hallmark_gluon_wide_extend", "hallmark_gluon_extend"),
        Phase.DECODE: ("hallmark_gluon_wide_decode", "hallmark_gluon_decode_combine"),
    }[phase]
    return KernelPath(
        f"gluon.{phase.value}.wide.hopper", Tier.FIRST, limits, _digest(f"hopper.wide.{phase.value}"), names, run,
        is_capturable=True, max_queries=_FEW_QUERIES if phase is Phase.DECODE else 1,
    )  # fmt: skip


def _window_path(run: RunAttention | None) -> KernelPath:
    """Return the Gluon path for short windows, whose limits are those of its variants."""
    limits = replace(
        _HOPPER_LIMITS,
        phases=frozenset({Phase.PREFILL}),
        max_head_dim=128,
        head_dim_multiple=64,
        page_size_multiple=1,
        softcap=False,
        max_window=128,  # keys: all that are before a tile's own fit in shared memory
        group_multiple=2,
    )
    return KernelPath(
        "gluon.prefill.window.hopper", Tier.FIRST, limits, _digest("hopper.window.launch"),
        ("hallmark_gluon_window_prefill",), run, is_capturable=True,
    )  # fmt: skip


def _full_hopper_path(run: RunAttention | None) -> KernelPath:
    """Return the Gluon path without a mask, of packed sequences whose tokens see each other both ways: images."""
    limits = replace(
        _HOPPER_LIMITS,
        phases=frozenset({Phase.PREFILL}),
        max_head_dim=128,
        page_size_multiple=1,
        window=False,
        softcap=False,
        sinks=False,
        masks=frozenset({Mask.FULL}),
    )
    return KernelPath(
        "gluon.prefill.unmasked.hopper", Tier.FIRST, limits, _digest("hopper.full.launch"),
        ("hallmark_gluon_full",), run, is_capturable=True,
    )  # fmt: skip


def _ordered_hopper_path(run: RunAttention | None) -> KernelPath:
    """Return the Gluon path of all phases whose bits depend on a token's own keys only."""
    limits = replace(_HOPPER_LIMITS, masks=frozenset({Mask.CAUSAL, Mask.SPANS}))
    return KernelPath(
        "gluon.ordered.hopper", Tier.FIRST, limits, _digest("hopper.ordered.launch"),
        ("hallmark_gluon_ordered", "hallmark_gluon_extend_plan", "hallmark_gluon_plan"), run, is_capturable=True,
        order="keys1024",
    )  # fmt: skip


def _ordered_triton_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path of all phases whose bits depend on a token's own keys only, on any GPU since Ampere."""
    limits = replace(_TRITON_LIMITS, devices=frozenset({Device.CUDA}))
    return KernelPath(
        "triton.ordered", Tier.FIRST, limits, _digest("portable.ordered"), ("hallmark_ordered",), run,
        is_capturable=True, order="keys512.triton",
    )  # fmt: skip


def _wide_ordered_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path of one order for heads of 512 dimensions."""
    limits = replace(_TRITON_LIMITS, devices=frozenset({Device.CUDA}), max_head_dim=512, head_dim_multiple=512)
    return KernelPath(
        "triton.wide.ordered", Tier.FIRST, limits, _digest("portable.wide_ordered"), ("hallmark_ordered",), run,
        is_capturable=True, order="keys512.wide",
    )  # fmt: skip


def _latent_triton_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path of all phases for values that are the first numbers of the keys."""
    digest = _digest("latent.portable")
    return KernelPath(
        "triton.latent", Tier.FIRST, _TRITON_LATENT_LIMITS, digest, ("hallmark_latent",), run, is_capturable=True
    )


def _ordered_latent_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path over latents whose bits depend on a token's own keys only."""
    limits = replace(_TRITON_LATENT_LIMITS, devices=frozenset({Device.CUDA}))
    return KernelPath(
        "triton.latent.ordered", Tier.FIRST, limits, _digest("latent.ordered"), ("hallmark_latent_ordered",), run,
        is_capturable=True, order="keys512.latent",
    )  # fmt: skip


def _indexed_triton_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path of all phases for latents that an indexer chooses; its bits depend on own keys only."""
    limits = replace(
        _TRITON_LIMITS,
        max_head_dim=576,
        window=False,
        softcap=False,
        sinks=False,
        masks=frozenset({Mask.CAUSAL}),
        max_values=Values(512, True, _INDEXER),
    )
    return KernelPath(
        "triton.latent.indexed", Tier.FIRST, limits, _digest("indexed.portable"),
        ("hallmark_indexed", "hallmark_latent_ordered_combine"), run, is_capturable=True, order="keys256.indexed",
    )  # fmt: skip


def _asymmetric_triton_path(run: RunAttention | None) -> KernelPath:
    """Return the Triton path of all phases for values of fewer numbers than keys; its bits depend on own keys only."""
    limits = replace(_TRITON_LIMITS, max_values=Values(256))
    return KernelPath(
        "triton.asymmetric", Tier.FIRST, limits, _digest("asymmetric.portable"),
        ("hallmark_asymmetric", "hallmark_ordered_combine"), run, is_capturable=True, order="keys512.asymmetric",
    )  # fmt: skip


def _sdpa_path(
    name: str,
    limits: Limits,
    run: RunAttention,
    *kernel_names: str,
) -> KernelPath:
    digest, devices = _digest("sdpa.backends"), competes_on(name)
    return KernelPath(name, tier_of(name), limits, digest, kernel_names, run, competes_on=devices)


def _bundled_paths() -> tuple[KernelPath, ...]:
    """The Gluon and Triton paths; without Triton they stay in the catalog, to say why they cannot run."""
    if launch.triton_version() is None:
        return (
            *(_hopper_path(phase, None) for phase in PLANNED_PHASES),
            _full_hopper_path(None),
            *(_wide_hopper_path(phase, None) for phase in PLANNED_PHASES),
            _window_path(None),
            *(_triton_path(phase, None, f"hallmark_{phase.value}") for phase in PLANNED_PHASES),
            *(_wide_triton_path(phase, None, f"hallmark_{phase.value}") for phase in PLANNED_PHASES),
            _ordered_hopper_path(None),
            _ordered_triton_path(None),
            _wide_ordered_path(None),
            _latent_triton_path(None),
            _ordered_latent_path(None),
            _indexed_triton_path(None),
            _asymmetric_triton_path(None),
            _fp8_hopper_path(None),
            _fp8_triton_path(Phase.EXTEND, None, "hallmark_extend_fp8"),
            _fp8_triton_path(Phase.DECODE, None, "hallmark_decode_fp8"),
        )
    from kernels.asymmetric.portable import run_asymmetric
    from kernels.fp8_cache.decode import run_decode_fp8
    from kernels.fp8_cache.extend import run_extend_fp8
    from kernels.fp8_cache.hopper.launch import run_decode_fp8_hopper
    from kernels.hopper.decode.launch import run_decode as run_hopper_decode
    from kernels.hopper.extend.launch import run_extend as run_hopper_extend
    from kernels.hopper.full.launch import run_full
    from kernels.hopper.ordered.launch import run_ordered as run_hopper_ordered
    from kernels.hopper.prefill.launch import run_prefill as run_hopper_prefill
    from kernels.hopper.wide.decode import run_wide_decode as run_wide_hopper_decode
    from kernels.hopper.wide.extend import run_wide_extend as run_wide_hopper_extend
    from kernels.hopper.wide.prefill import run_wide_prefill as run_wide_hopper_prefill
    from kernels.hopper.window.launch import run_window_prefill
    from kernels.indexed.portable import run_indexed
    from kernels.latent.ordered import run_latent_ordered
    from kernels.latent.portable import run_latent
    from kernels.portable.decode import run_decode
    from kernels.portable.extend import run_extend
    from kernels.portable.ordered import run_ordered
    from kernels.portable.prefill import run_prefill
    from kernels.portable.wide import run_wide_decode, run_wide_extend, run_wide_prefill
    from kernels.portable.wide_ordered import run_wide_ordered

    return (
        _hopper_path(Phase.PREFILL, run_hopper_prefill),
        _hopper_path(Phase.EXTEND, run_hopper_extend),
        _hopper_path(Phase.DECODE, run_hopper_decode),
        _full_hopper_path(run_full),
        _wide_hopper_path(Phase.PREFILL, run_wide_hopper_prefill),
        _wide_hopper_path(Phase.EXTEND, run_wide_hopper_extend),
        _wide_hopper_path(Phase.DECODE, run_wide_hopper_decode),
        _window_path(run_window_prefill),
        _triton_path(Phase.PREFILL, run_prefill, "hallmark_prefill"),
        _triton_path(Phase.EXTEND, run_extend, "hallmark_extend"),
        _triton_path(Phase.DECODE, run_decode, "hallmark_decode"),
        _wide_triton_path(Phase.PREFILL, run_wide_prefill, "hallmark_prefill"),
        _wide_triton_path(Phase.EXTEND, run_wide_extend, "hallmark_extend"),
        _wide_triton_path(Phase.DECODE, run_wide_decode, "hallmark_decode"),
        _ordered_hopper_path(run_hopper_ordered),
        _ordered_triton_path(run_ordered),
        _wide_ordered_path(run_wide_ordered),
        _latent_triton_path(run_latent),
        _ordered_latent_path(run_latent_ordered),
        _indexed_triton_path(run_indexed),
        _asymmetric_triton_path(run_asymmetric),
        _fp8_hopper_path(run_decode_fp8_hopper),
        _fp8_triton_path(Phase.EXTEND, run_extend_fp8, "hallmark_extend_fp8"),
        _fp8_triton_path(Phase.DECODE, run_decode_fp8, "hallmark_decode"),
    )


# torch's CPU attention is not proven beyond 256: larger head dims are a visible fallback on a laptop too.
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
    phases=_PLANNED_PHASES,
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
    phases=_PLANNED_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=1024,
    head_dim_multiple=8,
    min_sm=80,
    softcap=False,
    sinks=False,
    masks=_ALL_MASKS,
)
_MATH_LIMITS = Limits(
    devices=frozenset({Device.CPU, Device.CUDA, Device.INTERPRETER}),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=1024,
    masks=_ALL_MASKS,
)

# Over a cache of 8 bits, which no prompt of its own is read from.
_CACHED_PHASES = _ALL_PHASES - {Phase.PREFILL}
_FP8_CPU_LIMITS = replace(
    _CPU_LIMITS, phases=_CACHED_PHASES, kv_dtypes=frozenset({FP8}), head_dim_multiple=HEAD_DIM_MULTIPLE
)
_FP8_MATH_LIMITS = replace(
    _MATH_LIMITS, phases=_CACHED_PHASES, kv_dtypes=frozenset({FP8}), head_dim_multiple=HEAD_DIM_MULTIPLE
)

# Over values that are the first numbers of the keys. PyTorch's CPU attention takes heads of any size; up to 256 numbers
# are proven of others, these at 576.
_LATENT_CPU_LIMITS = replace(_CPU_LIMITS, max_head_dim=576, max_values=Values(512, is_latent=True))
_LATENT_MATH_LIMITS = replace(_MATH_LIMITS, max_values=Values(1024, is_latent=True))

_INDEXED_CPU_LIMITS = replace(
    _CPU_LIMITS,
    max_head_dim=576,
    window=False,
    masks=frozenset({Mask.CAUSAL}),
    max_values=Values(512, True, _INDEXER),
)

# Over values of fewer numbers than keys, which are padded as they are read.
_ASYMMETRIC_CPU_LIMITS = replace(_CPU_LIMITS, max_values=Values(256))
_ASYMMETRIC_MATH_LIMITS = replace(_MATH_LIMITS, max_values=Values(1024))
_TILES_LIMITS = Limits(
    devices=frozenset({Device.CPU}),
    phases=_ALL_PHASES,
    dtypes=_ALL_DTYPES,
    max_head_dim=1024,
    masks=frozenset({Mask.CAUSAL, Mask.SPANS}),
)

# In the order of preference: what we want to serve, then what we serve when we cannot, each path named in metrics.
PATHS: tuple[KernelPath, ...] = (
    *_bundled_paths(),
    _sdpa_path(
        "sdpa.cpu",
        _CPU_LIMITS,
        sdpa.run_cpu,
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    _sdpa_path("sdpa.cudnn", _CUDNN_LIMITS, sdpa.run_cudnn, "cudnn", *TORCH_HELPERS),
    _sdpa_path("sdpa.flash", _FLASH_LIMITS, sdpa.run_flash, "pytorch_flash::", *TORCH_HELPERS),
    _sdpa_path("sdpa.efficient", _EFFICIENT_LIMITS, sdpa.run_efficient, "fmha_cutlassF", *TORCH_HELPERS),
    _sdpa_path(
        "sdpa.math",
        _MATH_LIMITS,
        sdpa.run_math,
        *GEMMS,
        "softmax",
        *TORCH_HELPERS,
    ),
    KernelPath(
        "sdpa.cpu.fp8",
        tier_of("sdpa.cpu.fp8"),
        _FP8_CPU_LIMITS,
        _digest("fp8_cache.widened"),
        ("_scaled_dot_product_flash_attention_for_cpu",),
        widened.run_cpu_fp8,
    ),
    KernelPath(
        "sdpa.math.fp8",
        tier_of("sdpa.math.fp8"),
        _FP8_MATH_LIMITS,
        _digest("fp8_cache.widened"),
        (*GEMMS, "softmax", *TORCH_HELPERS),
        widened.run_math_fp8,
        competes_on=competes_on("sdpa.math.fp8"),
    ),
    KernelPath(
        "sdpa.cpu.latent",
        tier_of("sdpa.cpu.latent"),
        _LATENT_CPU_LIMITS,
        _digest("latent.eager"),
        ("_scaled_dot_product_flash_attention_for_cpu",),
        run_latent_cpu,
    ),
    KernelPath(
        "sdpa.math.latent",
        tier_of("sdpa.math.latent"),
        _LATENT_MATH_LIMITS,
        _digest("latent.eager"),
        (*GEMMS, "softmax", *TORCH_HELPERS),
        run_latent_math,
        competes_on=competes_on("sdpa.math.latent"),
    ),
    KernelPath(
        "torch.attention.latent.tiles",
        tier_of("torch.attention.latent.tiles"),
        replace(_TILES_LIMITS, max_values=Values(1024, is_latent=True)),
        _digest("latent.tiles"),
        (*GEMMS, *TORCH_HELPERS),
        run_latent_tiles,
        order="keys128.latent",
    ),
    KernelPath(
        "sdpa.cpu.latent.indexed",
        tier_of("sdpa.cpu.latent.indexed"),
        _INDEXED_CPU_LIMITS,
        _digest("indexed.eager"),
        ("_scaled_dot_product_flash_attention_for_cpu", "aten::mm", "aten::bmm"),
        run_indexed_cpu,
    ),
    KernelPath(
        "torch.attention.latent.indexed.tiles",
        tier_of("torch.attention.latent.indexed.tiles"),
        _INDEXED_CPU_LIMITS,
        _digest("indexed.tiles"),
        (*GEMMS, *TORCH_HELPERS),
        run_indexed_tiles,
        order="keys128.indexed",
    ),
    KernelPath(
        "torch.attention.tiles",
        tier_of("torch.attention.tiles"),
        _TILES_LIMITS,
        _digest("sdpa.key_tiles"),
        (*GEMMS, *TORCH_HELPERS),
        run_attention_tiles,
        order="keys128",
    ),
    KernelPath(
        "sdpa.cpu.asymmetric",
        tier_of("sdpa.cpu.asymmetric"),
        _ASYMMETRIC_CPU_LIMITS,
        _digest("asymmetric.eager"),
        ("_scaled_dot_product_flash_attention_for_cpu",),
        run_asymmetric_cpu,
    ),
    KernelPath(
        "sdpa.math.asymmetric",
        tier_of("sdpa.math.asymmetric"),
        _ASYMMETRIC_MATH_LIMITS,
        _digest("asymmetric.eager"),
        (*GEMMS, "softmax", *TORCH_HELPERS),
        run_asymmetric_math,
        competes_on=competes_on("sdpa.math.asymmetric"),
    ),
    KernelPath(
        "torch.attention.asymmetric.tiles",
        tier_of("torch.attention.asymmetric.tiles"),
        replace(_TILES_LIMITS, max_values=Values(1024)),
        _digest("asymmetric.eager"),
        (*GEMMS, *TORCH_HELPERS),
        run_asymmetric_tiles,
        order="keys128.asymmetric",
    ),
)

ALL_PATHS: tuple[AnyPath, ...] = (
    *PATHS,
    *LINEAR_PATHS,
    *EXPERTS_PATHS,
    *COLLECTIVE_PATHS,
    *RECURRENCE_PATHS,
    *CONVOLUTION_PATHS,
)  # of every operator; names are unique


def paths_on(device: "torch.device") -> tuple[AnyPath, ...]:
    """Every path, with what its limits say of this very GPU, and of those beside it."""
    of_states: tuple[AnyPath, ...] = (*RECURRENCE_PATHS, *CONVOLUTION_PATHS)
    return (*PATHS, *linear_paths_on(device), *EXPERTS_PATHS, *collective_paths_on(device), *of_states)


def path_named(name: str) -> KernelPath:
    """The path of attention of that name. Raises ValueError, naming those there are, for another."""
    return _named(PATHS, name)


def any_path_named(name: str) -> AnyPath:
    """The path of that name, of any operator. Raises ValueError, naming those there are, for another."""
    return _named(ALL_PATHS, name)


def _named(paths: tuple[PathT, ...], name: str) -> PathT:
    for path in paths:
        if path.name == name:
            return path
    raise ValueError(f"expected one of {', '.join(path.name for path in paths)}, found {name!r}")
