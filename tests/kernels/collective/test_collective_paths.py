"""Limits of the paths of sums, by rows and ranks."""

from dataclasses import replace

import pytest

from kernels.collective.paths import COLLECTIVE_PATHS, without_peer_memory
from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

PUSH, APART, EXCHANGE, NCCL, GLOO = COLLECTIVE_PATHS
SHAPE = CollectiveShape(Dtype.BF16, 4096, 2, Follows.ADD_NORM, TokenRows.LE_16)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "590", "13.0", "9.19", "2.11.0", "3.6.0")


@pytest.mark.parametrize(
    ("world", "rows", "takes"),
    [
        (2, TokenRows.LE_512, True),
        (2, TokenRows.LE_2K, False),
        (4, TokenRows.LE_128, True),
        (4, TokenRows.LE_512, False),
        (8, TokenRows.GT_8K, False),
    ],
)
def test_few_rows_are_pushed_and_many_are_not(world: int, rows: TokenRows, takes: bool) -> None:
    shape = replace(SHAPE, world=world, rows=rows)
    assert [it.code for it in PUSH.rejects(shape, H200)] == ([] if takes else [Reject.LENGTH])
    assert NCCL.rejects(shape, H200) == ()


@pytest.mark.parametrize(
    ("world", "rows", "code"),
    [
        (2, TokenRows.LE_512, Reject.LENGTH),
        (2, TokenRows.LE_2K, None),
        (2, TokenRows.GT_8K, None),
        (4, TokenRows.LE_2K, Reject.ARCH),
    ],
)
def test_many_rows_of_two_ranks_are_exchanged(world: int, rows: TokenRows, code: Reject | None) -> None:
    shape = replace(SHAPE, world=world, rows=rows)
    assert [it.code for it in EXCHANGE.rejects(shape, H200)] == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"dtype": Dtype.FP32}, Reject.DTYPE), ({"columns": 4100}, Reject.LAYOUT), ({"world": 16}, Reject.ARCH)],
)
def test_what_cannot_be_pushed_is_rejected(changes: dict[str, object], code: Reject) -> None:
    assert code in [it.code for it in PUSH.rejects(replace(SHAPE, **changes), H200)]  # type: ignore[arg-type]


def test_each_device_has_its_library() -> None:
    assert [it.code for it in GLOO.rejects(SHAPE, H200)] == [Reject.ARCH]


def test_ranks_without_shared_memory_push_nothing() -> None:
    paths = without_peer_memory(COLLECTIVE_PATHS, "cuIpcGetMemHandle failed")
    assert [it.refused and it.refused.code for it in paths] == [Reject.PEER_MEMORY] * 3 + [None] * 2
