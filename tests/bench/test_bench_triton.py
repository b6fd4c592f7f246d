"""The bench's inputs on our Triton paths; without a GPU in Triton's interpreter."""

import pytest
import torch

from bench.attention.inputs import make_inputs
from bench.attention.measure import errors_of
from bench.attention.run import contenders_of
from kernels.catalog import path_named
from kernels.reference.compare import reference_of
from kernels.system.device import read_fingerprint
from support.bench_fakes import decode, extend, prefill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", [prefill(70), extend(16, 40), decode(40, batch=2, windows=(24,), sinks=True)], ids=str)
def test_a_triton_path_is_right_on_the_inputs_of_the_bench(case: object) -> None:
    path = path_named(f"triton.{case.shape.phase.value}")
    contender = contenders_of([path], [], read_fingerprint(DEVICE))[0]
    inputs = make_inputs(case, DEVICE, seed=1)
    prepared = contender.prepare(inputs)
    reference = reference_of(inputs.q, inputs.k, inputs.v, inputs.batch, inputs.flags, rows=inputs.rows)
    assert errors_of(prepared, prepared.call, reference, inputs.rows).is_within_rule
