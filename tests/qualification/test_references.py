"""References of a shape that comes again are kept, within a bound."""

from dataclasses import replace

import pytest
import torch
from qualification_fakes import DECODE, SHAPE

from kernels.attention.oracle import attention_oracle
from kernels.buckets import Bucket
from qualification.inputs import cases, long_case
from qualification.references import References, Shelf
from qualification.rows import row_reference

CPU = torch.device("cpu")


@pytest.fixture
def references() -> References:
    """Of a first case."""
    found = References()
    found.of(next(cases(replace(SHAPE, num_heads=2, num_kv_heads=1, head_dim=16), CPU, seed=0)))
    return found


def test_what_was_put_on_the_shelf_is_taken_off_it_once(references: References) -> None:
    shelf = Shelf(references.num_bytes)
    shelf.put(SHAPE, references)
    assert shelf.take(DECODE) is not references
    assert shelf.take(SHAPE) is references
    assert shelf.take(SHAPE).num_bytes == 0


def test_a_full_shelf_takes_no_more_until_something_is_taken_off_it(references: References) -> None:
    shelf = Shelf(2 * references.num_bytes - 1)
    shelf.put(SHAPE, references)
    shelf.put(DECODE, references)
    assert shelf.take(DECODE) is not references
    shelf.take(SHAPE)
    shelf.put(DECODE, references)
    assert shelf.take(DECODE) is references


def test_the_truth_of_many_keys_is_that_of_the_oracle() -> None:
    """It is computed of one query head of each KV head at a time: heads and sinks must come back in their places."""
    shape = replace(DECODE, num_heads=6, num_kv_heads=2, head_dim=16, context_bucket=Bucket.LE_32K, sinks=True)
    case = long_case(shape, CPU, seed=0)
    expected = attention_oracle(case.q, case.k, case.v, case.batch, case.flags, dtype=torch.float32)
    assert torch.allclose(row_reference(case).truth, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected[:, 0], expected[:, 1], rtol=0, atol=1e-3)
