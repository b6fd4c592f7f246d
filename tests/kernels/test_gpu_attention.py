"""Every path that runs on a CUDA GPU, in both half precisions, against the oracle: `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, attend, flags_for, packed, paged

from kernels.batch import AttentionFlags
from kernels.buckets import Bucket
from kernels.catalog import PATHS, path_named
from kernels.device import dtype_of, read_fingerprint
from kernels.fingerprint import Device, Fingerprint
from kernels.functional import shape_of
from kernels.path import KernelPath, RunAttention
from kernels.portable.decode import run_decode
from kernels.reference.compare import compare
from kernels.shape import AttentionShape, Mask, Phase

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
Dims = tuple[tuple[int, int], int]  # (query heads, key heads), head dim
Flags = tuple[tuple[str, ...], int | None, bool]  # names, window, causal
DTYPES = [torch.bfloat16, torch.float16]
DIMS: list[Dims] = [((32, 8), 128), ((14, 2), 64), ((4, 4), 80), ((16, 4), 256), ((6, 6), 40)]
GPU_PATHS = [path.name for path in PATHS if path.name != "sdpa.cpu"]
H200 = Fingerprint(Device.CUDA, "H200", 90, None, None, None, "", "")
PLAIN: Flags = ((), None, True)
ALL_FLAGS: Flags = (("softcap", "sinks", "spans"), 64, True)
SINGLE_FLAGS: list[Flags] = [
    ((), None, False),
    ((), 100, True),
    (("softcap",), None, True),
    (("sinks",), 129, True),
    (("spans",), None, True),
]
# Each flag at one head dim; none and all of them at every head dim, each in a dtype of its own: all is compiled.
CASES = [
    *((DIMS[0], torch.bfloat16, flags) for flags in SINGLE_FLAGS),
    *((dims, DTYPES[(i + j) % 2], (PLAIN, ALL_FLAGS)[j]) for i, dims in enumerate(DIMS) for j in range(2)),
]


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


def served(phase: Phase) -> pytest.MarkDecorator:
    """Parametrise a test by each (path, case) of a phase that the path serves."""
    cases = [(path.name, *case) for path in PATHS for case in CASES if is_served(path, phase, *case)]
    return pytest.mark.parametrize(("path", "dims", "dtype", "flag_values"), cases)


def flags_of(inputs: Inputs, values: Flags) -> AttentionFlags:
    names, window, causal = values
    return flags_for(inputs, *names, window=window, causal=causal)


def runner(name: str, inputs: Inputs, flags: AttentionFlags) -> RunAttention:
    """The path's function; skips what the catalog says it rejects."""
    path = path_named(name)
    shape = shape_of(inputs.q, inputs.k, inputs.batch, flags)
    rejections = path.rejects(shape, read_fingerprint(CUDA))
    if rejections:
        pytest.skip("; ".join(rejection.detail for rejection in rejections))
    assert path.run is not None
    return path.run


@served(Phase.PREFILL)
def test_packed_ragged_prompts(path: str, dims: Dims, dtype: torch.dtype, flag_values: Flags) -> None:
    inputs = packed([1, 127, 0, 128, 300, 129], CUDA, heads=dims[0], head_dim=dims[1], dtype=dtype)
    flags = flags_of(inputs, flag_values)
    assert_right(runner(path, inputs, flags), inputs, flags)


@served(Phase.EXTEND)
def test_chunks_over_paged_context(path: str, dims: Dims, dtype: torch.dtype, flag_values: Flags) -> None:
    inputs = paged([1, 63, 0, 130, 5], [300, 63, 17, 257, 128], CUDA, heads=dims[0], head_dim=dims[1], dtype=dtype)
    flags = flags_of(inputs, flag_values)
    assert_right(runner(path, inputs, flags), inputs, flags)


@served(Phase.DECODE)
def test_decode_over_paged_context(path: str, dims: Dims, dtype: torch.dtype, flag_values: Flags) -> None:
    inputs = paged([1, 1, 0, 1, 1, 1], [1, 4000, 17, 15, 0, 257], CUDA, heads=dims[0], head_dim=dims[1], dtype=dtype)
    flags = flags_of(inputs, flag_values)
    assert_right(runner(path, inputs, flags), inputs, flags)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("path", ["triton.prefill", "triton.extend", "triton.decode", "sdpa.efficient", "sdpa.math"])
def test_fp32_is_not_rounded_to_tf32(path: str, head_dim: int) -> None:
    inputs = {
        "triton.prefill": lambda: packed([70, 300], CUDA, head_dim=head_dim, dtype=torch.float32),
        "triton.decode": lambda: paged([1, 1], [70, 900], CUDA, head_dim=head_dim, dtype=torch.float32),
    }.get(path, lambda: paged([20, 100], [70, 300], CUDA, head_dim=head_dim, dtype=torch.float32))()
    flags = flags_for(inputs)
    assert_right(runner(path, inputs, flags), inputs, flags)


@pytest.mark.parametrize("path", ["triton.prefill", "sdpa.cudnn", "sdpa.flash"])
def test_a_long_prompt_at_sampled_rows(path: str) -> None:
    inputs = packed([32768, 3], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    flags = flags_for(inputs)
    out = attend(runner(path, inputs, flags), inputs, flags)
    rows = torch.tensor([0, 1, 127, 128, 4095, 16384, 20001, 32766, 32767, 32770], device=CUDA)
    errors = compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)
    assert errors.is_within_rule, errors


@pytest.mark.parametrize("path", ["gluon.extend.hopper", "triton.extend", "triton.decode"])
def test_a_long_context(path: str) -> None:
    queries = [1, 1] if path == "triton.decode" else [300, 5]
    inputs = paged(queries, [131_073, 40_001], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    flags = flags_for(inputs)
    out = attend(runner(path, inputs, flags), inputs, flags)
    rows = torch.arange(0, inputs.q.shape[0], max(1, inputs.q.shape[0] // 8), device=CUDA)
    errors = compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)
    assert errors.is_within_rule, errors


def example(path: KernelPath) -> tuple[Inputs, AttentionFlags]:
    """A batch that the path serves."""
    phase = path.name.split(".")[1]
    if phase == "decode":
        inputs = paged([1, 1], [100, 900], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    elif phase == "extend":
        inputs = paged([30, 100], [70, 300], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    else:
        inputs = packed([300, 1, 128], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    return inputs, flags_for(inputs)


@pytest.mark.parametrize("name", GPU_PATHS)
def test_the_profiler_sees_the_kernels_that_the_catalog_names(name: str) -> None:
    path = path_named(name)
    inputs, flags = example(path)
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["gluon.extend.hopper", "triton.prefill", "triton.extend", "triton.decode"])
def test_a_triton_path_never_waits_for_the_gpu(name: str) -> None:
    inputs, flags = example(path_named(name))
    run = runner(name, inputs, flags)
    expected = attend(run, inputs, flags)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(run, inputs, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)  # and gives the same bits again


def test_a_cuda_graph_of_decode_follows_the_lengths() -> None:
    inputs, flags = example(path_named("triton.decode"))
    lens = inputs.batch.context_lens
    assert lens is not None
    out = attend(run_decode, inputs, flags)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_decode(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    for lengths in ([100, 900], [1, 500], [7, 0]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32, device=CUDA))
        out.fill_(NAN)
        graph.replay()
        assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags).is_within_rule


def test_queries_beyond_2_to_the_31_elements_are_addressed() -> None:
    inputs = packed([100], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    flags = flags_for(inputs)
    expected = attend(runner("triton.prefill", inputs, flags), inputs, flags)
    stride = 2**25
    wide = torch.empty(2 * 50 * stride + 50 * stride, dtype=torch.bfloat16, device=CUDA)
    q = wide.as_strided((100, 8, 128), (stride, 128, 1))
    out = wide.as_strided((100, 8, 128), (stride, 128, 1), storage_offset=4096)
    q.copy_(inputs.q)
    run = path_named("triton.prefill").run
    assert run is not None
    run(q, inputs.k, inputs.v, inputs.batch, flags, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["gluon.extend.hopper", "triton.extend", "triton.decode"])
def test_a_pool_of_more_than_2_to_the_31_elements(name: str) -> None:
    queries = [1, 1] if name == "triton.decode" else [30, 7]
    inputs = paged(queries, [70, 300], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    flags = flags_for(inputs)
    run = runner(name, inputs, flags)
    expected = attend(run, inputs, flags)
    used = inputs.k.shape[0]
    pool = 2**31 // inputs.k[0].numel() + used
    k, v = (torch.full((pool, *inputs.k.shape[1:]), NAN, dtype=torch.bfloat16, device=CUDA) for _ in "kv")
    k[-used:], v[-used:] = inputs.k, inputs.v
    table = inputs.batch.page_table
    assert table is not None
    far = torch.where(table < used, table + pool - used, table)
    moved = replace(inputs, k=k, v=v, batch=replace(inputs.batch, page_table=far))
    assert torch.equal(attend(run, moved, flags), expected)
