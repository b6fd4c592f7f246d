"""The path that the library takes by itself, beside what the reviewed matrices say is the fastest."""

from collections.abc import Mapping

import pytest

from kernels.catalog import PATHS
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.path import Tier
from kernels.vocabulary.preference import asked_for
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.evidence.matrix import MATRICES, load_matrices, load_matrix

GPUS = sorted(folder.name for folder in MATRICES.iterdir() if folder.is_dir())
BUNDLED = frozenset(path.name for path in PATHS if path.tier is Tier.FIRST and not path.is_for_order)
# A launch through Triton's binder takes the host 22 to 40 us, one that a plan repeats 3 (one core of a Xeon, without
# the driver): a kernel that saves the device less is not faster for who calls it.
BINDER_US = 25.0
# Where a path of Triton is faster on the device, by less than that: prompts and chunks of few tokens, and chunks under
# a short window. By how many times at most, on any GPU.
EXCEPTIONS = {
    (Phase.PREFILL, Bucket.LE_128): 1.75,
    (Phase.PREFILL, Bucket.LE_512): 1.2,
    (Phase.EXTEND, Bucket.LE_128): 1.65,
    (Phase.EXTEND, Bucket.LE_512): 1.5,
    (Phase.EXTEND, Bucket.LE_2K): 1.35,
}


def fingerprint_of(gpu: str) -> Fingerprint:
    first = load_matrix(min((MATRICES / gpu).glob("*.json")))
    return next(iter(first.evidence.values())).fingerprint


def proven_times(gpu: str) -> dict[AttentionShape, dict[str, float]]:
    """Microseconds of each bundled path that is proven for a shape."""
    found: dict[AttentionShape, dict[str, float]] = {}
    for (shape, path), evidence in load_matrices(MATRICES, fingerprint_of(gpu)).evidence.items():
        timing = evidence.believed_timing
        if isinstance(shape, AttentionShape) and path in BUNDLED and evidence.is_proven and timing is not None:
            found.setdefault(shape, {})[path] = timing.p50_us
    return found


def chosen(shape: AttentionShape, gpu: Fingerprint) -> str:
    """The path of a call of the most queries that the shape's bucket has."""
    asked = asked_for(PATHS, shape, shape.query_bucket.hi or shape.query_bucket.lo + 1)
    return next(path.name for path, of_path in asked if not path.rejects(of_path, gpu))


def is_excepted(shape: AttentionShape, times: Mapping[str, float], path: str) -> bool:
    fastest = min(times, key=lambda name: times[name])
    most = EXCEPTIONS.get((shape.phase, shape.query_bucket), 1.0)
    is_small = times[path] / times[fastest] <= most and times[path] - times[fastest] < BINDER_US
    return fastest.startswith("triton.") and is_small


@pytest.mark.parametrize("gpu", GPUS)
def test_the_library_takes_the_fastest_proven_path(gpu: str) -> None:
    machine, found = fingerprint_of(gpu), proven_times(gpu)
    assert len(found) > 400
    slow = {}
    for shape, times in found.items():
        path = chosen(shape, machine)
        if times[path] > min(times.values()) and not is_excepted(shape, times, path):
            slow[str(shape)] = (path, times)
    assert slow == {}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("bucket", "window", "expected"), [
    (Bucket.LE_32K, 128, "gluon.prefill.window.hopper"),  # 1.65 of FA3's speed, where that for any window has 0.83
    (Bucket.LE_32K, 129, "gluon.prefill.hopper"),
])  # fmt: skip
def test_a_shape_of_no_matrix_takes_the_path_made_for_it(gpu: str, bucket: Bucket, window: int, expected: str) -> None:
    shape = AttentionShape(Phase.PREFILL, Dtype.BF16, Dtype.BF16, 64, 8, 64, bucket, bucket, window=window)
    assert chosen(shape, fingerprint_of(gpu)) == expected
