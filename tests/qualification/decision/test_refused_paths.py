"""A path that the machine's set-up refuses: another serves, as a fallback with that reason; it is not measured."""

import pytest

from kernels.collective.paths import COLLECTIVE_PATHS, without_peer_memory
from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import AnyPath, Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Book, Policy, decide
from qualification.measure.start_plan import missing_pairs

SHAPE = CollectiveShape(Dtype.BF16, 4096, 2, Follows.ADD_NORM, TokenRows.LE_16)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "590", "13.0", "9.19", "2.11.0", "3.6.0")
REFUSED = without_peer_memory(COLLECTIVE_PATHS, "cuIpcOpenMemHandle_v2 failed on rank 1 of 2")


@pytest.mark.parametrize(
    ("paths", "path", "reasons"),
    [
        (COLLECTIVE_PATHS, "triton.collective.push", (Reject.UNPROVEN,)),
        (REFUSED, "nccl.collective", (Reject.PEER_MEMORY,)),
    ],
)
def test_sums_fall_back_where_ranks_share_no_memory(
    paths: tuple[AnyPath, ...], path: str, reasons: tuple[Reject, ...]
) -> None:
    decision = decide(SHAPE, paths=paths, fingerprint=H200, book=Book(), quarantined=frozenset(), policy=Policy.DEGRADE)
    assert (decision.path, decision.wanted, decision.fallback_reasons) == (path, "triton.collective.push", reasons)


def test_a_refused_path_is_not_measured() -> None:
    missing = missing_pairs([SHAPE], paths=REFUSED, fingerprint=H200, book=Book(), quarantined=frozenset())
    assert [path.name for _, path in missing] == ["nccl.collective"]
