"""Limits of the paths of sums, by rows and ranks."""

from dataclasses import replace

import pytest

from kernels.collective.paths import COLLECTIVE_PATHS, CollectivePath, without_peer_memory
from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

PUSH, APART, EXCHANGE, NCCL, GLOO = COLLECTIVE_PATHS
SHAPE = CollectiveShape(Dtype.BF16, 4096, 2, Follows.ADD_NORM, TokenRows.LE_16)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "590", "13.0", "9.19", "2.11.0", "3.6.0")


@pytest.mark.parametrize(
    ("path", "changes", "codes"),
    [
        (PUSH, {"rows": TokenRows.LE_512}, []),
        (PUSH, {"rows": TokenRows.LE_2K}, [Reject.LENGTH]),
        (PUSH, {"world": 4, "rows": TokenRows.LE_128}, []),
        (PUSH, {"world": 4, "rows": TokenRows.LE_512}, [Reject.LENGTH]),
        (PUSH, {"world": 8, "rows": TokenRows.GT_8K}, [Reject.LENGTH]),
        (PUSH, {"dtype": Dtype.FP32}, [Reject.DTYPE]),
        (PUSH, {"columns": 4100}, [Reject.LAYOUT]),
        (PUSH, {"world": 16}, [Reject.ARCH]),
        (NCCL, {"world": 8, "rows": TokenRows.GT_8K}, []),
        (EXCHANGE, {"rows": TokenRows.LE_512}, [Reject.LENGTH]),
        (EXCHANGE, {"rows": TokenRows.LE_2K}, []),
        (EXCHANGE, {"rows": TokenRows.GT_8K}, []),
        (EXCHANGE, {"world": 4, "rows": TokenRows.LE_2K}, [Reject.ARCH]),
        (GLOO, {}, [Reject.ARCH]),
    ],
)
def test_a_path_rejects_what_it_cannot_sum(
    path: CollectivePath, changes: dict[str, object], codes: list[Reject]
) -> None:
    assert [it.code for it in path.rejects(replace(SHAPE, **changes), H200)] == codes  # type: ignore[arg-type]


def test_ranks_without_shared_memory_push_nothing() -> None:
    paths = without_peer_memory(COLLECTIVE_PATHS, "cuIpcGetMemHandle failed")
    assert [it.refused and it.refused.code for it in paths] == [Reject.PEER_MEMORY] * 3 + [None] * 2
