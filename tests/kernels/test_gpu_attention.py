"""Every path that runs on a CUDA GPU against the oracle's rule: `pytest -m gpu`.

The rule asks for zeros where a query sees no key, and for no NaN, which every batch has beside what may be read.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels.calls.batch import AttentionFlags
from kernels.catalog import PATHS, path_named
from kernels.functional import shape_of
from kernels.hopper.variants import LONG, LONG_SOFTCAP, LONG_WINDOW
from kernels.reference.compare import compare
from kernels.system.device import dtype_of, read_fingerprint
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import KernelPath, RunAttention
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Mask, Phase
from support.attention.cases import BF16, CHUNKS, CUDA, FP16, PROMPTS, TOKENS, Case, images, made, run_of
from support.attention.inputs import (
    FIXED_SEEDS,
    Inputs,
    assert_right,
    attend,
    errors_of,
    flags_for,
    fresh_seeds,
    packed,
    paged,
)

pytestmark = pytest.mark.gpu

ALL = ("softcap", "sinks", "spans")
FEWER_PROMPTS = (1, 2, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 300, 777, 2049)
FLAGGED_PROMPTS = (1, 64, 65, 129, 0, 300, 777, 1300)
LONG_PROMPTS = (5, LONG + 9, 0, 300, 193)
TOKEN_SHAPES = [(64, (32, 8)), (64, (14, 2)), (128, (32, 8)), (128, (7, 1)), (128, (6, 3)), (256, (16, 4)),
                (256, (8, 1))]  # fmt: skip
CLUSTER_SHAPES = [(64, (32, 8)), (64, (16, 4)), (80, (16, 4)), (128, (32, 8)), (128, (16, 4)), (256, (16, 4)),
                  (256, (8, 8))]  # fmt: skip
THREE_SHAPES = [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))]


def prompt_cases() -> Iterator[Case]:
    path = "gluon.prefill"
    for (dim, heads), dtype in product(
        [(64, (8, 8)), (64, (8, 2)), (128, (8, 2)), (128, (7, 1)), (256, (4, 1)), (256, (4, 4))], (BF16, FP16)
    ):
        yield Case(path, PROMPTS, dim=dim, heads=heads, dtype=dtype)
    for dim in (64, 128, 256):
        for length in (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025):
            yield Case(path, (length,), dim=dim, heads=(4, 1))
        contexts = tuple(length + 333 * (i % 3) + 7 * (i % 2) for i, length in enumerate(PROMPTS))
        yield Case(path, PROMPTS, contexts, dim=dim, heads=(4, 1))
        yield Case(path, PROMPTS, dim=dim, heads=(4, 1), loudness=15.0)
        yield Case(path, (5, 300, 200, 64), (0, 60, 1, 64), dim=dim, heads=(4, 2))  # some see no key
    yield Case(path, (5, 300, 200, 64), (0, 60, 1, 64), heads=(4, 2), flags=("sinks",))
    yield Case(path, (70,), (0,), heads=(4, 2))
    for dim in (48, 64):
        yield Case(path, LONG_PROMPTS, dim=dim, heads=(2, 1), variant="three consumers")
    for dim in (40, 80, 96, 112, 192):  # padded
        yield Case(path, PROMPTS, dim=dim, heads=(4, 2))
        yield Case(path, PROMPTS, dim=dim, heads=(4, 2), flags=ALL, window=200, softcap=20.0)
    for dim, has_context in ((64, False), (128, False), (256, False), (128, True)):
        keys = tuple(x + 211 * (i % 3) for i, x in enumerate(FLAGGED_PROMPTS)) if has_context else None
        flagged: list[dict[str, object]] = [
            *({"window": window} for window in (1, 2, 63, 64, 65, 127, 128, 129, 500, 1024, 100_000)),
            {"softcap": 30.0}, {"flags": ("sinks",)}, {"flags": ("spans",)}, {"window": 300, "softcap": 50.0},
            {"window": 128, "flags": ("sinks",)}, {"window": 100, "flags": ("spans",)},
            {"window": 200, "softcap": 20.0, "flags": ALL},
        ]  # fmt: skip
        for given in flagged:
            yield Case(path, FLAGGED_PROMPTS, keys, dim=dim, heads=(6, 2), **given)  # type: ignore[arg-type]
    for window in (LONG_WINDOW, LONG_WINDOW + 65, 100_000):
        yield Case(
            path, LONG_PROMPTS, dim=64, heads=(4, 2), flags=("sinks",), window=window, variant="low blocks skipped"
        )
    for window in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 500):  # consumers end at different blocks
        yield Case("gluon.prefill by three", FEWER_PROMPTS, dim=64, heads=(4, 2), window=window)
    for dim in (72, 80, 88, 96, 136, 192):
        yield Case(path, FEWER_PROMPTS, dim=dim, heads=(4, 2), variant="two parts")
    for dim, width in product((80, 136, 192), (None, 1, 65, 300)):
        contexts, flags = tuple(x + 70 for x in FEWER_PROMPTS), ("sinks",)
        yield Case(path, FEWER_PROMPTS, contexts, dim=dim, heads=(4, 2), flags=flags, window=width, softcap=30.0)
    # The last cap lets weights be so small that no normal number holds them.
    for softcap, loudness, dtype in product((5.0, 50.0, 1000.0), (1.0, 8.0), (BF16, FP16)):
        yield Case(
            path, (*FEWER_PROMPTS, LONG_SOFTCAP + 9), dim=64, heads=(4, 2), dtype=dtype, flags=("sinks",),
            softcap=softcap, loudness=loudness, variant="polynomials",
        )  # fmt: skip


def window_cases() -> Iterator[Case]:
    path, flags = "gluon.prefill.window", ("sinks",)
    for (dim, heads), dtype in product([(64, (64, 8)), (64, (12, 2)), (64, (2, 1)), (128, (32, 4))], (BF16, FP16)):
        yield Case(path, PROMPTS, dim=dim, heads=heads, dtype=dtype, flags=flags, window=128)
    for window in (1, 2, 31, 32, 33, 64, 100, 127, 128):
        yield Case(path, PROMPTS, dim=64, window=window)
    contexts = tuple(max(0, x + 211 * (i % 3) - 70 * (i % 2)) for i, x in enumerate(PROMPTS))  # some see no key
    for dim, window in product((64, 128), (20, 128)):
        yield Case(path, PROMPTS, contexts, dim=dim, flags=flags, window=window)


def chunk_cases() -> Iterator[Case]:
    path = "gluon.extend"
    for dim in (40, 64, 80, 96, 112, 128, 136, 192, 256):
        yield Case(path, *CHUNKS, dim=dim)
    for dim in (64, 96, 128, 192, 256):  # one of each tiling
        yield Case(path, *CHUNKS, dim=dim, dtype=FP16)
    for heads in ((8, 8), (8, 4), (8, 1), (14, 2), (6, 1), (64, 1), (128, 1)):
        yield Case(path, *CHUNKS, dim=64, heads=heads)
    for dim in (40, 80, 96, 112, 136, 160, 192):  # padded
        yield Case(path, *CHUNKS, dim=dim, flags=ALL, window=200)
    for dim in (64, 128, 192, 256):
        for page_size in (16, 48, 96, 128, 256):  # parts of a tile, which they divide or not, a tile and more
            yield Case(path, *CHUNKS, dim=dim, page_size=page_size)
        yield Case(path, *CHUNKS, dim=dim, loudness=15.0)
        yield Case(path, (300, 5), (60, 0), dim=dim, heads=(4, 1))  # some see no key
    windows = (1, 15, 63, 64, 65, 127, 128, 129, 1000, 100_000)
    for dim, heads in ((64, (8, 2)), (128, (8, 2)), (192, (8, 2)), (256, (8, 2)), (128, (6, 2))):
        for window in windows if heads == (8, 2) else (1, 64, 127, 1000):
            yield Case(path, *CHUNKS, dim=dim, heads=heads, window=window)
        for name in ALL:
            yield Case(path, *CHUNKS, dim=dim, heads=heads, flags=(name,))
        yield Case(path, *CHUNKS, dim=dim, heads=heads, flags=("spans",), window=100)
        yield Case(path, *CHUNKS, dim=dim, heads=heads, flags=ALL, window=200)
    for (queries, contexts), dim, flags in product(
        [((16,), (40_000,)), ((100, 3), (9000, 70_000)), ((1,), (131_072,))],  # keys in parts
        (64, 80, 96, 128, 136, 192, 256),
        [(), ("sinks",)],
    ):
        yield Case(path, queries, contexts, dim=dim, flags=flags)
    plain, sinks, softcap = (), ("sinks",), ("softcap",)
    for (tokens, context, page_size), dim, names in (
        *(((512, 3000, 64), dim, names) for dim in (112, 128) for names in (plain, sinks, softcap)),
        ((500, 700, 16), 128, plain), ((500, 700, 16), 128, softcap), ((1030, 1030, 128), 128, plain),
    ):  # fmt: skip
        shape = {"dim": dim, "heads": (32, 8), "page_size": page_size}
        yield Case(path, (tokens,), (context,), flags=names, variant="whole tiles", **shape)  # type: ignore[arg-type]
    for heads, flags in product([(8, 2), (14, 2)], [(), ("sinks",)]):
        yield Case("gluon.extend by three", *CHUNKS, dim=64, heads=heads, flags=flags)
        yield Case("gluon.extend by three", (700,), (30_000,), dim=64, heads=heads, flags=flags)


def token_cases() -> Iterator[Case]:
    path = "gluon.decode"
    for (dim, heads), dtype in product(TOKEN_SHAPES, (BF16, FP16)):
        yield Case(path, *TOKENS, dim=dim, heads=heads, dtype=dtype)
    for dim in (40, 80, 96, 112, 192):  # padded
        yield Case(path, *TOKENS, dim=dim, heads=(8, 4))
        yield Case(path, *TOKENS, dim=dim, heads=(8, 4), flags=("softcap", "sinks"), window=50)
    for page_size in (16, 32, 48, 128):
        yield Case(path, *TOKENS, page_size=page_size)
    for heads in ((16, 1), (32, 1), (40, 2), (128, 1)):  # too large for one row
        yield Case(path, *TOKENS, heads=heads)
    for dim in (64, 128, 256):
        for window in (1, 2, 31, 32, 33, 64, 100, 3999, 4001):
            yield Case(path, *TOKENS, dim=dim, heads=(8, 4), window=window)
        for flags in (("softcap",), ("sinks",), ("softcap", "sinks")):
            width = 50 if len(flags) == 2 else None
            yield Case(path, *TOKENS, dim=dim, heads=(16, 4), flags=flags, window=width)
    for most, dim in product((2, 3, 8, 16), (64, 128, 192, 256)):
        # As when drafted tokens are verified; some have more queries than keys before them, one more than keys at all.
        draw = random.Random(most)
        drafted = (most, 0, *(draw.randint(1, most) for _ in range(6)), 2)
        contexts = (most, 5, *(draw.randint(most, 700) for _ in range(6)), 1)
        yield Case(path, drafted, contexts, dim=dim)
        yield Case(path, drafted, contexts, dim=dim, flags=("softcap", "sinks"), window=30)
    for dim, heads in ((64, (32, 8)), (128, (32, 8)), (128, (8, 1)), (256, (16, 4))):
        yield Case(path, (1, 1), (131_073, 5), dim=dim, heads=heads)
    yield Case(path, (1,) * 301, (30_001, *(1 + 7 * number % 90 for number in range(300))))
    few_and_many = (5000, *(1 + 97 * number % 1100 for number in range(40)), 17_000)  # parts of a row
    for (dim, heads), flags in product(
        [(64, (32, 8)), (128, (32, 8)), (128, (48, 3)), (256, (16, 4))], [(), ("sinks",)]
    ):
        yield Case(path, (1,) * 42, few_and_many, dim=dim, heads=heads, flags=flags)
    yield Case(path, (1,) * 700, tuple((37 * number) % 200 for number in range(700)), dim=64, heads=(2, 1))
    for flags in ((), ("sinks",)):
        yield Case(path, (1, 1, 1), (0, 1, 0), flags=flags)


def wide_cases() -> Iterator[Case]:
    """Heads of 512, of which two consumers have half each."""
    for heads, dtype in product([(4, 2), (4, 1), (3, 3)], (BF16, FP16)):
        yield Case("gluon.prefill.wide", PROMPTS, dim=512, heads=heads, dtype=dtype)
    contexts = tuple(length + 333 * (i % 3) + 7 * (i % 2) for i, length in enumerate(PROMPTS))
    yield Case("gluon.prefill.wide", PROMPTS, contexts, dim=512, heads=(4, 1))
    yield Case("gluon.prefill.wide", PROMPTS, dim=512, heads=(4, 1), loudness=15.0)
    yield Case("gluon.prefill.wide", (5, 300, 200, 64), (0, 60, 1, 64), dim=512, heads=(4, 2))  # some see no key
    for heads, page_size in (((16, 2), 64), ((8, 2), 64), ((8, 1), 16), ((6, 1), 48), ((16, 2), 128)):
        yield Case("gluon.extend.wide", *CHUNKS, dim=512, heads=heads, page_size=page_size)
        yield Case("gluon.decode.wide", *TOKENS, dim=512, heads=heads, page_size=page_size)
    for queries, keys in (((16,), (40_000,)), ((100, 3), (9000, 30_000)), ((300, 5), (60, 0)), ((4, 4), (5000, 300))):
        yield Case("gluon.extend.wide", queries, keys, dim=512, heads=(8, 1))
    yield Case("gluon.extend.wide", *CHUNKS, dim=512, dtype=FP16, loudness=15.0)
    for most in (2, 3, 8):
        drafted, keys = (most, 0, 1, most, 2), (most, 5, 700, 3000, 1)
        yield Case("gluon.decode.wide", drafted, keys, dim=512, heads=(16, 2))
    yield Case("gluon.decode.wide", (1, 1), (131_073, 5), dim=512, heads=(8, 1), dtype=FP16)
    yield Case("gluon.decode.wide", (1,) * 301, (30_001, *(1 + 7 * i % 90 for i in range(300))), dim=512, heads=(8, 2))


def one_token_cases() -> Iterator[Case]:
    path = "gluon.decode"
    for (dim, heads), context in product(
        CLUSTER_SHAPES, (1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 1024, 1025, 2048)
    ):
        yield Case(path, (1,), (context,), dim=dim, heads=heads, variant="clusters")
    for page_size, context in product((16, 48, 128), (17, 500, 2000)):
        yield Case(path, (1,), (context,), heads=(32, 8), page_size=page_size, variant="clusters")
    for (dim, heads), flags in product(THREE_SHAPES, [("softcap",), ("sinks",), ("softcap", "sinks")]):
        yield Case(path, (1,), (700,), dim=dim, heads=heads, flags=flags, variant="clusters")
    for context in (2, 129, 2000):
        yield Case(path, (2,), (context,), heads=(16, 4), flags=("sinks",), variant="clusters")
    for dim, heads in THREE_SHAPES:
        yield Case("gluon.decode in clusters", (1,), (20_001,), dim=dim, heads=heads)


def series(cases: Iterable[Case]) -> list[tuple[Case, ...]]:
    """Cases that differ in lengths and numbers only, for which kernels are rarely compiled anew, are one test."""
    found: dict[Case, list[Case]] = {}
    for case in cases:
        keys = None if case.keys is None else ()
        window, softcap = (None if given is None else 0 for given in (case.window, case.softcap))
        kind = replace(case, queries=(), keys=keys, window=window, softcap=softcap, loudness=1.0)
        found.setdefault(kind, []).append(case)
    return [tuple(of_kind) for of_kind in found.values()]


@pytest.mark.parametrize(
    "cases",
    series([*prompt_cases(), *window_cases(), *chunk_cases(), *token_cases(), *one_token_cases(), *wide_cases()]),
    ids=lambda cases: f"{cases[0]} and {len(cases) - 1} more",
)
def test_hopper_batches_are_within_the_rule(cases: tuple[Case, ...]) -> None:
    wrong = {}
    for case in cases:
        torch.manual_seed(0)
        errors = errors_of(*made(case))
        if not errors.is_within_rule:
            wrong[str(case)] = errors
    assert wrong == {}


# Of the paths of every GPU: (query heads, key heads), head dim.
Dims = tuple[tuple[int, int], int]
Flags = tuple[tuple[str, ...], int | None, bool]  # names, window, causal
DIMS: list[Dims] = [((32, 8), 128), ((14, 2), 64), ((4, 4), 80), ((16, 4), 256), ((6, 6), 40)]
H200 = Fingerprint(Device.CUDA, "H200", 90, None, None, None, "", "")
PLAIN: Flags = ((), None, True)
ALL_FLAGS: Flags = (ALL, 64, True)
SINGLE_FLAGS: list[Flags] = [
    ((), None, False),
    ((), 100, True),
    (("softcap",), None, True),
    (("sinks",), 129, True),
    (("spans",), None, True),
]
# Each flag at one head dim; none and all of them at every head dim, each in a dtype of its own: all is compiled.
CASES = [
    *((DIMS[0], BF16, flags) for flags in SINGLE_FLAGS),
    *((dims, (BF16, FP16)[(i + j) % 2], (PLAIN, ALL_FLAGS)[j]) for i, dims in enumerate(DIMS) for j in range(2)),
]
LENGTHS: dict[Phase, tuple[list[int], list[int]]] = {  # of queries and of contexts
    Phase.PREFILL: ([1, 127, 0, 128, 300, 129], []),
    Phase.EXTEND: ([1, 63, 0, 130, 5], [300, 63, 17, 257, 128]),
    Phase.DECODE: ([1, 1, 0, 1, 1, 1], [1, 4000, 17, 15, 0, 257]),
}


def is_served(path: KernelPath, phase: Phase, dims: Dims, dtype: torch.dtype, flags: Flags) -> bool:
    """Return whether the catalog lets a path serve a case on an sm_90 GPU; `runner` skips the rest on other GPUs."""
    (num_heads, num_kv_heads), head_dim = dims
    names, window, causal = flags
    shape = AttentionShape(
        phase, dtype_of(dtype), dtype_of(dtype), num_heads, num_kv_heads, head_dim, Bucket.LE_512, Bucket.LE_8K,
        page_size=None if phase is Phase.PREFILL else 16, window=window, softcap=20.0 if "softcap" in names else None,
        sinks="sinks" in names, mask=Mask.SPANS if "spans" in names else Mask.CAUSAL if causal else Mask.FULL,
    )  # fmt: skip
    return not path.rejects(shape, H200)


SERVED = [
    (path.name, phase, *case)
    for phase in PLANNED_PHASES
    for path in PATHS
    for case in CASES
    if is_served(path, phase, *case)
]


def runner(name: str, inputs: Inputs, flags: AttentionFlags) -> RunAttention:
    """The path's function; skips what the catalog says it rejects."""
    path = path_named(name)
    shape = shape_of(inputs.q, inputs.k, inputs.batch, flags)
    rejections = path.rejects(shape, read_fingerprint(CUDA))
    if rejections:
        pytest.skip("; ".join(rejection.detail for rejection in rejections))
    assert path.run is not None
    return path.run


@pytest.mark.parametrize(("path", "phase", "dims", "dtype", "flag_values"), SERVED)
def test_what_the_catalog_allows_is_right(
    path: str, phase: Phase, dims: Dims, dtype: torch.dtype, flag_values: Flags
) -> None:
    (queries, contexts), (heads, head_dim) = LENGTHS[phase], dims
    if phase is Phase.PREFILL:
        inputs = packed(queries, CUDA, heads=heads, head_dim=head_dim, dtype=dtype)
    else:
        inputs = paged(queries, contexts, CUDA, heads=heads, head_dim=head_dim, dtype=dtype)
    names, window, causal = flag_values
    flags = flags_for(inputs, *names, window=window, causal=causal)
    assert_right(runner(path, inputs, flags), inputs, flags)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("path", ["triton.prefill", "triton.extend", "triton.decode", "sdpa.efficient", "sdpa.math"])
def test_fp32_is_not_rounded_to_tf32(path: str, head_dim: int) -> None:
    if path == "triton.prefill":
        inputs = packed([70, 300], CUDA, head_dim=head_dim, dtype=torch.float32)
    else:
        queries, contexts = ([1, 1], [70, 900]) if path == "triton.decode" else ([20, 100], [70, 300])
        inputs = paged(queries, contexts, CUDA, head_dim=head_dim, dtype=torch.float32)
    flags = flags_for(inputs)
    assert_right(runner(path, inputs, flags), inputs, flags)


@pytest.mark.parametrize(
    ("path", "queries", "contexts"),
    [
        *((path, [32768, 3], None) for path in ("triton.prefill", "sdpa.cudnn", "sdpa.flash")),
        *((path, [300, 5], [131_073, 40_001]) for path in ("gluon.extend.hopper", "triton.extend")),
        ("triton.decode", [1, 1], [131_073, 40_001]),
    ],
)
def test_long_sequences_are_right_at_sampled_rows(path: str, queries: list[int], contexts: list[int] | None) -> None:
    if contexts is None:
        inputs = packed(queries, CUDA, heads=(8, 2), head_dim=128, dtype=BF16)
        rows = torch.tensor([0, 1, 127, 128, 4095, 16384, 20001, 32766, 32767, 32770], device=CUDA)
    else:
        inputs = paged(queries, contexts, CUDA, heads=(8, 2), head_dim=128, dtype=BF16)
        rows = torch.arange(0, inputs.q.shape[0], max(1, inputs.q.shape[0] // 8), device=CUDA)
    flags = flags_for(inputs)
    out = attend(runner(path, inputs, flags), inputs, flags)
    errors = compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)
    assert errors.is_within_rule, errors


@pytest.mark.parametrize("name", [path.name for path in PATHS if path.name != "sdpa.cpu"])
def test_the_profiler_sees_the_kernels_that_the_catalog_names(name: str) -> None:
    path, phase = path_named(name), name.split(".")[1]
    if phase in ("decode", "extend"):
        queries, contexts = ([1, 1], [100, 900]) if phase == "decode" else ([30, 100], [70, 300])
        inputs = paged(queries, contexts, CUDA, heads=(8, 2), head_dim=128, dtype=BF16)
    else:
        inputs = packed([300, 1, 128], CUDA, heads=(8, 2), head_dim=128, dtype=BF16)
    flags = flags_for(inputs)
    run = runner(name, inputs, flags)
    attend(run, inputs, flags)
    out = torch.empty_like(inputs.q)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
        torch.cuda.synchronize()
    is_cuda = torch.autograd.DeviceType.CUDA
    seen = {event.name for event in profile.events() if event.device_type == is_cuda}
    unnamed = [kernel for kernel in seen if not any(part in kernel for part in path.kernel_names)]
    assert unnamed == []
    if name != "sdpa.math":
        assert any(path.kernel_names[0] in kernel for kernel in seen), seen


def difference_from_triton(case: Case, spans: torch.Tensor | None = None) -> float:
    """The largest difference of the outputs of both kernels."""
    run, inputs, flags = made(case)
    if spans is not None:
        flags = AttentionFlags(flags.scale, flags.causal, flags.window, flags.softcap, flags.sinks, spans)
    theirs = attend(run_of(case.path.replace("gluon", "triton")), inputs, flags).float()
    return float((attend(run, inputs, flags).float() - theirs).abs().max())


# Two roundings of outputs up to 4 units large (an ulp of 2 ** -6 there), and of the weights before.
CLOSE = 2**-5


def check_prompts(seed: int) -> None:
    rng = random.Random(seed)
    dim, kv_heads = rng.choice([64, 128, 256]), rng.choice([1, 2, 4])
    heads = kv_heads * {64: 7, 128: 4, 256: 1}[dim]  # few: Triton's kernel is compiled for each
    lengths = [rng.choice([0, 1, rng.randrange(1, 200), rng.randrange(1, 2500)]) for _ in range(rng.randrange(1, 40))]
    lengths[0] = max(1, lengths[0])
    queries, keys = tuple(lengths), None
    if dim == 128 and rng.random() < 0.5:
        keys = tuple(length + rng.choice([0, 0, 129, 1000]) for length in queries)
    given = rng.choice(["", "", "window", "sinks", "softcap", "spans", "window spans"])  # few: each is compiled
    case = Case(
        "gluon.prefill", queries, keys, dim=dim, heads=(heads, kv_heads), flags=("sinks",) if given == "sinks" else (),
        window=rng.randrange(1, 1500) if "window" in given else None, softcap=30.0 if given == "softcap" else None,
    )  # fmt: skip
    spans = images(queries, keys or queries, size=7 * rng.randrange(1, 40)) if "spans" in given else None
    assert difference_from_triton(case, spans) <= CLOSE


def check_chunks(seed: int) -> None:
    rng = random.Random(seed)
    dim, kv_heads = rng.choice([64, 128, 192, 256]), rng.choice([1, 2, 4])
    queries = [rng.choice([0, 1, rng.randrange(1, 200), rng.randrange(1, 1500)]) for _ in range(rng.randrange(1, 20))]
    queries[0] = max(1, queries[0])
    contexts = [max(1, length + rng.choice([0, 1, 129, 1000, rng.randrange(20_000), -3])) for length in queries]
    given = rng.choice(["", "", "window", "sinks", "softcap", "spans"])  # few: each is compiled
    case = Case(
        "gluon.extend", tuple(queries), tuple(contexts), dim=dim, heads=(kv_heads * 4, kv_heads),
        flags=(given,) if given in ALL else (), window=rng.randrange(1, 1500) if given == "window" else None,
    )  # fmt: skip
    assert difference_from_triton(case) <= CLOSE


def check_tokens(seed: int) -> None:
    rng = random.Random(seed)
    dim, heads = rng.choice([*TOKEN_SHAPES, (128, (8, 8)), (256, (12, 2))])  # few: each is compiled
    contexts = tuple(int(2 ** rng.uniform(0, 11)) for _ in range(rng.choice([1, 2, 3, 8, 33])))
    window = rng.choice([None, None, 77])
    case = Case("gluon.decode", (1,) * len(contexts), contexts, dim=dim, heads=heads, window=window)
    run, inputs, flags = made(case)
    ours, theirs = (attend(each, inputs, flags).float() for each in (run, run_of("triton.decode")))
    assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


@pytest.mark.parametrize("seeds", [*(tuple(FIXED_SEEDS[start::4]) for start in range(4)), None])
@pytest.mark.parametrize("check", [check_prompts, check_chunks, check_tokens])
def test_gluon_agrees_with_triton_on_random_batches(check, seeds: tuple[int, ...] | None) -> None:  # type: ignore[no-untyped-def]
    """Without seeds on fresh ones, for a while."""
    for seed in seeds or fresh_seeds():
        print("seed", seed)  # so that a failure can be repeated
        torch.manual_seed(seed)
        check(seed)
