"""Faults of kernels, planted: those that are wrong, that are slow, and that are somebody else's."""

import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import PATHS, path_named
from kernels.system.device import read_fingerprint
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.path import KernelPath, RunAttention, Tier
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.attest.promise import Promise, call_mismatch
from qualification.common.exit_code import ExitCode
from qualification.evidence.matrix import save_matrix
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.costs.profile import calls_seen
from qualification.measure.costs.timing import time_call
from qualification.measure.faults.attention_faults import (
    Fault,
    can_show,
    narrow_trial_shapes,
    spoil_tile,
    trial_of_many_tiles,
    trial_shapes,
    wrong_kernel,
)
from qualification.measure.inputs.attention_inputs import Case, cases
from qualification.measure.inputs.far_pages import far_cases
from qualification.measure.qualify import Bench, qualify_path
from server.cli import main as cli

SLOWDOWN = 1.3
Found = tuple[bool, dict[str, Any]]  # whether it was caught, and what was seen


@dataclass(frozen=True)
class Place:
    """The machine on which faults are planted."""

    device: torch.device
    fingerprint: Fingerprint
    folder: Path  # for files
    matrices: Path  # of the bundled model, measured here
    dtypes: tuple[Dtype, ...]

    @classmethod
    def here(cls, folder: Path, matrices: Path | None = None) -> "Place":
        is_cuda = torch.cuda.is_available()
        device = torch.device("cuda" if is_cuda else "cpu")
        dtypes = (Dtype.BF16, Dtype.FP32) if is_cuda else (Dtype.FP32,)
        return cls(device, read_fingerprint(device), folder, matrices or folder / "matrices", dtypes)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def first(self, shape: AttentionShape) -> KernelPath:
        """The catalog's first choice."""
        able = (path for path in PATHS if path.tier is Tier.FIRST and not path.rejects(shape, self.fingerprint))
        return next(path for path in able if path.run is not None)


def wrong_kernels(place: Place) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield each fault of `qualification.measure.faults.attention_faults`, in every dtype and phase that show it."""
    inputs = {
        shape: (list(cases(shape, place.device, seed=0)), References())
        for dtype in place.dtypes
        for shape in (*trial_shapes(dtype), *narrow_trial_shapes(dtype))
    }
    for fault in Fault:
        yield f"wrong kernel: {fault.value}", partial(_refused, fault, inputs)


def _refused(fault: Fault, inputs: dict[AttentionShape, tuple[list[Case], References]]) -> Found:
    found: dict[str, list[str]] = {}
    passed = []
    with one_thread():
        for shape, (its, references) in inputs.items():
            is_far = fault in (Fault.NONE, Fault.PAGES_IN_32_BITS)  # gigabytes of a GPU, so one shape after the other
            far = list(far_cases(shape, its[0].q.device, seed=7)) if is_far else []
            tried = far if fault is Fault.PAGES_IN_32_BITS else its + far
            if not can_show(fault, shape) or not tried:
                continue
            failed = [it.name for it in check_path(wrong_kernel(fault), tried, references) if not it.is_passed]
            found[str(shape)] = failed
            passed += [] if failed else [str(shape)]
    if fault is Fault.NONE:
        return len(passed) == len(found), {"shapes": len(found), "passed": len(passed)}
    checks = sorted({name for names in found.values() for name in names})
    return not passed, {"shapes": len(found), "refused": len(found) - len(passed), "by": checks}


def one_tile(place: Place) -> Found:
    """A real kernel, one tile of whose output misses every eighth key: 8 rows of one head in 10,080 such tiles."""
    case = trial_of_many_tiles(place.dtypes[0], place.device)
    path = place.first(replace(trial_shapes(place.dtypes[0])[0], window=None, softcap=None, sinks=False, num_heads=8))
    right = path.run
    assert right is not None

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        right(q, k, v, batch, flags, out)
        spoil_tile(q, k, v, batch, flags, out)

    failed = [check for check in check_path(run, [case]) if not check.is_passed]
    is_right_passed = all(check.is_passed for check in check_path(right, [case]))
    seen = {check.name: [check.measured, check.limit] for check in failed}
    tiles = case.q.shape[0] // 8 * case.q.shape[1]
    return bool(failed) and is_right_passed, {
        "path": path.name,
        "tiles": tiles,
        "refused_by": seen,
        "right_kernel_passes": is_right_passed,
    }


def _served(place: Place, phase: Phase) -> AttentionShape:
    """Return a shape of Llama-3.1-8B on a GPU, and one that takes milliseconds on a CPU."""
    query, context = {
        Phase.PREFILL: (Bucket.LE_8K, Bucket.LE_8K),
        Phase.EXTEND: (Bucket.LE_512, Bucket.LE_8K),
        Phase.DECODE: (Bucket.LE_128, Bucket.LE_32K),
    }[phase]
    heads, kv_heads = 32, 8
    if not place.is_cuda:
        query, context = Bucket.LE_128 if phase is Phase.DECODE else Bucket.LE_512, Bucket.LE_512
        heads, kv_heads = 4, 2
    page_size = None if phase is Phase.PREFILL else 64
    dtype = place.dtypes[0]
    return AttentionShape(phase, dtype, dtype, heads, kv_heads, 128, query, context, page_size)


def slower(place: Place, phase: Phase) -> Found:
    """The same kernel with a wait of 0.3 of its time behind it: `hallmark matrix diff` must end with code 2."""
    shape = _served(place, phase)
    path = place.first(shape)
    bench = Bench(place.fingerprint, place.device, may_profile=False)
    before, again = (qualify_path(shape, path, bench) for _ in range(2))
    assert before.timing is not None
    right, wait = path.run, _waiting((SLOWDOWN - 1) * before.timing.p50_us, place)

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        assert right is not None
        right(q, k, v, batch, flags, out)
        wait()

    after = qualify_path(shape, replace(path, run=run), bench)
    assert again.timing is not None
    assert after.timing is not None
    files = {}
    for name, evidence in (("before", before), ("again", again), ("after", after)):
        files[name] = place.folder / f"{phase.value}-{name}.json"
        save_matrix(files[name], [evidence])
    said = StringIO()
    with redirect_stdout(said):
        same = cli.main(["matrix", "diff", str(files["before"]), str(files["again"])])
        code = cli.main(["matrix", "diff", str(files["before"]), str(files["after"])])
    is_caught = after.is_proven and code == ExitCode.PERFORMANCE and same == ExitCode.PASS
    times = {"p50_us": before.timing.p50_us, "again_us": again.timing.p50_us, "slower_us": after.timing.p50_us}
    return is_caught, {
        "shape": str(shape),
        "path": path.name,
        **times,
        "exit_code_same": int(same),
        "exit_code_slower": int(code),
        "said": said.getvalue().splitlines()[-4:],
    }


def _waiting(wait_us: float, place: Place) -> Callable[[], None]:
    if not place.is_cuda:
        return lambda: time.sleep(wait_us * 1e-6)
    num_cycles = 2_000_000
    torch.cuda._sleep(num_cycles)
    cycle_us = time_call(lambda: torch.cuda._sleep(num_cycles), place.device, budget_s=0.1).p50_us / num_cycles
    return lambda: torch.cuda._sleep(round(wait_us / cycle_us))


def math_behind_a_mask(place: Place) -> Found:
    """Check PyTorch's choice for grouped heads under a mask where it is not pinned, and that a pin cannot hide it."""
    shape = replace(_served(place, Phase.PREFILL), query_bucket=Bucket.LE_512, context_bucket=Bucket.LE_512, window=100)
    pinned = "sdpa.efficient" if place.is_cuda else "sdpa.cpu"
    inputs = list(islice(cases(shape, place.device, seed=0), 2))

    def seen(run: RunAttention) -> tuple[str, ...]:
        calls = [partial(run, it.q, it.k, it.v, it.batch, it.flags, torch.empty_like(it.q)) for it in inputs]
        for call in calls:
            call()
        return calls_seen(calls, place.device).always

    runs = {name: path_named(name).run for name in (pinned, "sdpa.math")}
    names = {name: seen(run) for name, run in runs.items() if run is not None}
    promise = Promise(pinned, names[pinned])
    mismatch = call_mismatch(promise, dict.fromkeys(names["sdpa.math"], 1))
    unpinned = _unpinned(shape, place)
    return mismatch is not None and not set(names[pinned]) & set(names["sdpa.math"]), {
        "shape": str(shape),
        "kernels": {name: list(kernels) for name, kernels in names.items()},
        "unpinned_pytorch_runs": unpinned,
        "said": mismatch,
    }


def _unpinned(shape: AttentionShape, place: Place) -> list[str]:
    """Return the kernels of scaled_dot_product_attention, called as a model's code would call it."""
    dtype = torch.bfloat16 if place.is_cuda else torch.float32
    q = torch.randn(1, shape.num_heads, 512, shape.head_dim, dtype=dtype, device=place.device)
    k = torch.randn(1, shape.num_kv_heads, 512, shape.head_dim, dtype=dtype, device=place.device)
    mask = torch.ones(512, 512, dtype=torch.bool, device=place.device).tril().triu(-99)

    def call() -> None:
        scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)

    call()
    return list(calls_seen([call], place.device).always)
