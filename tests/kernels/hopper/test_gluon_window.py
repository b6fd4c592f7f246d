"""`gluon.prefill.window.hopper`, run in numpy, against the oracle, with NaN in every key of no sequence."""

from functools import partial

import pytest
import torch

from kernels.calls.batch import AttentionFlags
from kernels.hopper.window.kernel import SEQS
from kernels.hopper.window.variants import window_variant
from support.attention.inputs import assert_right, flags_for, packed
from support.emulator.window_by_numpy import run_in_numpy

CPU = torch.device("cpu")


def check(queries: list[int], keys: list[int] | None = None, *, window: int = 128, sinks: bool = True) -> None:
    inputs = packed(queries, CPU, key_lens=keys, heads=(8, 2), dtype=torch.float32)
    flags = flags_for(inputs, *(["sinks"] if sinks else []), window=window)
    run = partial(run_in_numpy, variant=window_variant(64, 4, flags), num_programs=3)
    assert_right(run, inputs, flags)


@pytest.mark.parametrize("window", [128, 100, 7])
def test_windows_of_ragged_prompts(window: int) -> None:
    check([1, 31, 0, 33, 200], window=window, sinks=window == 128)


@pytest.mark.parametrize("window", [128, 5])
def test_queries_after_a_context_and_before_the_first_key(window: int) -> None:
    check([40, 70, 5], [300, 31, 0], window=window)


def test_more_sequences_than_the_scheduler_reads_at_once() -> None:
    check([1, 2, *[0] * (SEQS.value - 4), 3, 1, 2, 0, 70])


@pytest.mark.parametrize(
    ("head_dim", "group", "changes", "names"),
    [(80, 8, {"window": 128}, "head_dim"), (64, 7, {"window": 128}, "query heads"), (64, 8, {"window": 129}, "window"),
     (64, 8, {}, "window"), (64, 8, {"window": 128, "softcap": 30.0}, "softcap")],
)  # fmt: skip
def test_what_the_limits_reject_is_refused(head_dim: int, group: int, changes: dict[str, float], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        window_variant(head_dim, group, AttentionFlags(1.0, **changes))  # type: ignore[arg-type]
