"""The rule accepts what rounding explains, in any order, and refuses what it does not."""

from dataclasses import replace

import pytest
import torch

from kernels.calls.batch import AttentionFlags
from kernels.reference.compare import Errors, coarse_reference_of, compare, errors_of, reference_of
from kernels.reference.oracle import attention_oracle, chunks
from kernels.sdpa import backends as sdpa
from support.attention.inputs import Inputs, flags_for, packed

CPU = torch.device("cpu")


def measure(inputs: Inputs, flags: AttentionFlags, out: torch.Tensor, rows: torch.Tensor | None = None) -> Errors:
    return compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows)


def batch_of_64(dtype: torch.dtype = torch.float16) -> tuple[Inputs, AttentionFlags, torch.Tensor]:
    inputs = packed([64], CPU)
    inputs = replace(inputs, q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))
    flags = flags_for(inputs)
    return inputs, flags, attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_truth_rounded_once_is_right(dtype: torch.dtype) -> None:
    inputs, flags, truth = batch_of_64(dtype)
    errors = measure(inputs, flags, truth.to(dtype))
    assert errors.is_within_rule
    assert errors.max_error == float((truth.to(dtype).double() - truth).abs().max())


@pytest.mark.parametrize("order", ["as they are", "reversed", "large keys first"])
def test_any_order_of_keys_is_right(order: str) -> None:
    """Full attention does not depend on the order of keys; fp32 sums do."""
    inputs, flags, _ = batch_of_64(torch.float32)
    flags = replace(flags, causal=False)
    places = {
        "as they are": torch.arange(64),
        "reversed": torch.arange(63, -1, -1),
        "large keys first": inputs.k[:64].norm(dim=(1, 2)).argsort(descending=True),
    }[order]
    out = torch.empty_like(inputs.q)
    sdpa.run_math(inputs.q, inputs.k[places], inputs.v[places], inputs.batch, flags, out)
    assert measure(inputs, flags, out).is_within_rule


def test_one_wrong_number_is_refused_and_found() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[40, 1, 7] += 0.01
    errors = measure(inputs, flags, out)
    assert not errors.is_within_rule
    assert errors.worst_at == (40, 1, 7)
    assert 0.009 < errors.worst_error < 0.011
    assert errors.worst == pytest.approx(errors.worst_error / errors.worst_limit)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 1.003), (torch.float16, 0.9994), (torch.float32, 1.00001)]
)
def test_a_scaled_output_is_refused_by_its_bias(dtype: torch.dtype, scale: float) -> None:
    inputs, flags, truth = batch_of_64(dtype)
    errors = measure(inputs, flags, (truth * scale).to(dtype))
    assert abs(errors.bias) > errors.bias_limit
    assert errors.bias == pytest.approx(scale - 1, rel=0.2)
    assert not errors.is_within_rule


def test_one_nan_is_refused() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[3, 0, 0] = float("nan")
    errors = measure(inputs, flags, out)
    assert errors.num_nonfinite == 1
    assert errors.worst == float("inf")
    assert not errors.is_within_rule


def test_only_the_chosen_rows_are_measured() -> None:
    inputs, flags, truth = batch_of_64()
    out = truth.half()
    out[10] = float("nan")
    assert measure(inputs, flags, out, rows=torch.tensor([9, 11])).is_within_rule
    assert not measure(inputs, flags, out, rows=torch.tensor([9, 10])).is_within_rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ("window", "softcap", "sinks")])
def test_coarse_limits_hold_the_fine_ones(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Coarse limits are above the fine ones, and less than 20 times as large."""
    inputs, _, _ = batch_of_64(dtype)
    flags = flags_for(inputs, *names)
    arguments = inputs.q, inputs.k, inputs.v, inputs.batch, flags
    coarse = coarse_reference_of(*arguments)
    truth = attention_oracle(*arguments)
    assert errors_of(truth.to(dtype), coarse).is_within_rule
    fine = compare(truth.to(dtype), *arguments)
    assert fine.worst_limit < float(coarse.limit[fine.worst_at]) < 20 * fine.worst_limit


def test_a_query_without_keys_must_give_zero() -> None:
    inputs, flags, _ = batch_of_64()
    spans = replace(inputs.batch, cu_seqlens_k=torch.tensor([0, 60], dtype=torch.int32))
    inputs = replace(inputs, k=inputs.k[:60], v=inputs.v[:60], batch=spans)
    truth = attention_oracle(inputs.q, inputs.k, inputs.v, inputs.batch, flags)
    assert measure(inputs, flags, truth.half()).is_within_rule
    out = truth.half()
    out[0, 0, 0] = 6e-8  # the smallest number there is
    assert truth[0].abs().max() == 0
    assert not measure(inputs, flags, out).is_within_rule


@pytest.mark.parametrize(("dtype", "sink"), [(torch.float16, 16.0), (torch.bfloat16, 60.0)])
def test_weights_may_be_relative_to_the_sink(dtype: torch.dtype, sink: float) -> None:
    """A kernel may start its running maximum with the sink: fp16 weights lose their bits, bf16 ones keep them."""
    inputs, flags, _ = batch_of_64(dtype)
    flags = replace(flags, sinks=torch.full((inputs.q.shape[1],), sink))
    arguments = inputs.q, inputs.k, inputs.v, inputs.batch, flags
    (chunk,) = chunks(*arguments, rows=None, dtype=torch.float64)
    assert chunk.sink_weights is not None
    rounded = (chunk.weights / chunk.sink_weights).to(dtype).double() * chunk.sink_weights
    out = chunk.by_row(rounded @ chunk.values).to(dtype).contiguous()
    for reference in (reference_of(*arguments), coarse_reference_of(*arguments)):
        assert errors_of(out, reference).is_within_rule
        assert not errors_of(2 * out, reference).is_within_rule
