"""References of a shape that comes again are kept, within a bound."""

from dataclasses import replace

import pytest
import torch

from qualification.measure.checks.references import References, Shelf
from qualification.measure.inputs.attention_inputs import cases
from support.qualification_fakes import DECODE, SHAPE

CPU = torch.device("cpu")


@pytest.fixture
def references() -> References:
    """References of a first case."""
    found = References()
    found.of(next(cases(replace(SHAPE, num_heads=2, num_kv_heads=1, head_dim=16), CPU, seed=0)))
    return found


def test_what_was_put_on_the_shelf_is_taken_off_it_once(references: References) -> None:
    shelf = Shelf(references.num_bytes)
    shelf.put(SHAPE, references)
    assert shelf.take(DECODE) is not references
    assert shelf.take(SHAPE) is references
    assert shelf.take(SHAPE).num_bytes == 0


def test_full_shelf_takes_no_more(references: References) -> None:
    shelf = Shelf(2 * references.num_bytes - 1)
    shelf.put(SHAPE, references)
    shelf.put(DECODE, references)
    assert shelf.take(DECODE) is not references
    shelf.take(SHAPE)
    shelf.put(DECODE, references)
    assert shelf.take(DECODE) is references
