import math
import sys
from dataclasses import replace

import pytest
import torch

from kernels.reference.oracle import attention_oracle
from kernels.vocabulary.shape import AttentionShape, Dtype
from qualification.evidence.evidence import Check, required_checks
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import CaseReference, References
from qualification.measure.faults.attention_faults import Fault, trial_of_many_tiles, wrong_kernel
from qualification.measure.inputs.attention_inputs import Case, cases
from support.qualification_fakes import DECODE, SHAPE

CPU = torch.device("cpu")


def measure(run: object, shape: AttentionShape = SHAPE) -> dict[str, Check]:
    return {check.name: check for check in check_path(run, cases(shape, CPU, seed=0))}


def right(q, k, v, batch, flags, out) -> None:
    out.copy_(attention_oracle(q, k, v, batch, flags))


@pytest.mark.parametrize("shape", [SHAPE, DECODE], ids=str)
def test_the_truth_itself_passes_every_required_check(shape: AttentionShape) -> None:
    found = measure(right, shape)
    assert set(found) == required_checks(shape)
    assert all(check.is_passed for check in found.values())


def test_a_row_that_is_not_written_counts_as_not_finite() -> None:
    def run(q, k, v, batch, flags, out) -> None:
        right(q, k, v, batch, flags, out)
        out[-1] = torch.nan

    found = measure(run)
    assert found["nonfinite"].measured == 4 * 64
    assert found["drawn_rows"].measured == sys.float_info.max


def test_an_error_that_is_no_number_does_not_pass() -> None:
    class Lost(References):
        def of(self, case: Case) -> CaseReference:
            found = super().of(case)
            return replace(found, every=replace(found.every, limit=found.every.limit * math.nan))

    found = {check.name: check for check in check_path(right, cases(SHAPE, CPU, seed=0), Lost())}
    assert [check.name for check in found.values() if not check.is_passed] == ["every_row"]


def test_kernel_that_changes_its_inputs_is_refused() -> None:
    def run(q, k, v, batch, flags, out) -> None:
        v.mul_(2.0)
        right(q, k, v, batch, flags, out)

    assert not measure(run)["drawn_rows"].is_passed


def test_paths_of_a_shape_share_one_reference() -> None:
    """The second path's checks are what they would be alone."""
    inputs, shared = list(cases(SHAPE, CPU, seed=0)), References()
    first = {case.name: shared.of(case) for case in inputs}
    wrong = wrong_kernel(Fault.FUTURE_KEY)
    assert check_path(right, inputs, shared) == check_path(right, inputs)
    assert check_path(wrong, cases(SHAPE, CPU, seed=0), shared) == check_path(wrong, inputs)
    assert all(shared.of(case) is first[case.name] for case in cases(SHAPE, CPU, seed=0))


def test_each_measure_keeps_its_worst_case() -> None:
    def run(q, k, v, batch, flags, out) -> None:
        right(q, k, v, batch, flags, out)
        if q.std() > 25:
            out += 0.5

    found = measure(run)
    assert found["drawn_rows"].case == found["every_row"].case == found["bias"].case == "large_logits"


def test_a_failed_check_says_where_and_by_how_much() -> None:
    def run(q, k, v, batch, flags, out) -> None:
        right(q, k, v, batch, flags, out)
        out[5, 1, 7] += 0.5

    found = measure(run)
    assert found["drawn_rows"].where.startswith("row 5, head 1, column 7: off by 0.5, at most ")
    assert found["nonfinite"].where == ""


def test_what_a_path_raises_goes_through() -> None:
    def run(*_: object) -> None:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        measure(run)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        inside = torch.get_num_threads()
    assert (inside, torch.get_num_threads()) == (1, before)


def test_the_trial_tries_one_wrong_tile_among_10_000() -> None:
    many = trial_of_many_tiles(Dtype.BF16, CPU).q
    assert many.shape[0] // 8 * many.shape[1] > 10_000  # of 8 rows of one head
