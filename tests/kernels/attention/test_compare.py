"""The rule accepts what rounding explains and refuses what it does not."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, flags_for, packed

from kernels.attention.batch import AttentionFlags
from kernels.attention.compare import Errors, compare
from kernels.attention.oracle import attention_naive, attention_oracle

CPU = torch.device("cpu")


def measure(inputs: Inputs, flags: AttentionFlags, out: torch.Tensor, rows: torch.Tensor | None = None) -> Errors:
    return compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)


def batch_of_64() -> tuple[Inputs, AttentionFlags, torch.Tensor]:
    inputs = packed([64], CPU)
    flags = flags_for(inputs)
    return inputs, flags, attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)


def test_the_truth_rounded_once_is_within_the_rule_and_the_cap() -> None:
    inputs, flags, truth = batch_of_64()
    errors = measure(inputs, flags, truth.half())
    assert errors.is_within_rule
    assert errors.is_within_cap
    assert errors.max_error < errors.naive_max_error


def test_naive_attention_is_within_its_own_rule() -> None:
    inputs, flags, _ = batch_of_64()
    errors = measure(inputs, flags, attention_naive(inputs.q, inputs.k, inputs.v, inputs.batch, flags))
    assert errors.max_error == errors.naive_max_error
    assert errors.is_within_rule


def test_one_wrong_number_is_refused() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[40, 1, 7] += 0.01
    errors = measure(inputs, flags, out)
    assert not errors.is_within_rule
    assert not errors.is_within_cap
    assert 0.009 < errors.max_error < 0.011


def test_a_small_bias_everywhere_is_refused_by_the_mean() -> None:
    inputs, flags, truth = batch_of_64()
    errors = measure(inputs, flags, (truth + 6e-4).half())
    assert errors.max_error <= errors.max_limit
    assert errors.mean_error > errors.mean_limit
    assert not errors.is_within_rule


def test_one_nan_is_refused() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[3, 0, 0] = float("nan")
    errors = measure(inputs, flags, out)
    assert errors.num_nonfinite == 1
    assert not errors.is_within_rule
    assert not errors.is_within_cap


def test_only_the_chosen_rows_are_measured() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[10] = float("nan")
    assert measure(inputs, flags, out, rows=torch.tensor([9, 11])).is_within_rule
    assert not measure(inputs, flags, out, rows=torch.tensor([9, 10])).is_within_rule


def test_naive_attention_that_overflows_sets_no_limit() -> None:
    inputs, flags, _ = batch_of_64()
    inputs = replace(inputs, q=inputs.q * 0 + 60_000)  # times k this is beyond fp16
    flags = replace(flags, scale=1.0)
    errors = measure(inputs, flags, torch.zeros_like(inputs.q))
    assert errors.max_limit == errors.absolute_cap
    assert not errors.is_within_rule


def test_a_softcap_allows_three_times_the_error_of_naive_attention() -> None:
    inputs, flags, truth = batch_of_64()
    plain = measure(inputs, flags, truth.half())
    capped = measure(inputs, replace(flags, softcap=50.0), truth.half())
    rounding = torch.finfo(torch.float16).eps * float(truth.abs().max())
    assert plain.max_limit == pytest.approx(2 * plain.naive_max_error + rounding)
    assert capped.max_limit == pytest.approx(3 * capped.naive_max_error + rounding, rel=0.01)
