"""References are kept by the name of an input: no two inputs of a shape may have the same."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from kernels.collective.shape import CollectiveShape, Follows
from kernels.experts.kinds import ExpertFormat
from kernels.experts.portable.eager import experts_eager
from kernels.experts.shape import ExpertsShape
from kernels.experts.tiles import token_counts
from kernels.fused.activation_kind import Activation
from kernels.linear.shape import LinearShape
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.checks.checked import AnyCase, uniquely_named
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.inputs.attention_inputs import cases
from qualification.measure.inputs.collective_inputs import collective_cases
from qualification.measure.inputs.experts_inputs import experts_cases
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from support.qualification_fakes import DECODE, SHAPE

CPU = torch.device("cpu")
# Of (experts, active) with neighbouring borders, and of well-known models, which have none; all 100 of the first
# kind are started by trials/odd_starts.py.
PAIRS = ((3, 2), (5, 3), (6, 4), (7, 4), (8, 5), (9, 6), (10, 6), (12, 7), (16, 9), (8, 2), (32, 4), (60, 4), (128, 8))


def mixture(num_experts: int, num_active: int, rows: TokenRows) -> ExpertsShape:
    return ExpertsShape(
        Dtype.FP32, ExpertFormat.PLAIN, num_experts, num_active, 8, 8, Activation.SILU, has_bias=False, rows=rows
    )


def names(inputs: Iterable[AnyCase]) -> list[tuple[str, int]]:
    return [(case.name, case.seed) for case in inputs]


def no_two_alike(found: Sequence[object]) -> bool:
    return len(found) == len(set(found)) > 0


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_inputs_of_a_mixture_have_names_of_their_own(pair: tuple[int, int]) -> None:
    for rows in (TokenRows.LE_16, TokenRows.LE_128, TokenRows.LE_512):
        found = names(experts_cases(mixture(*pair, rows), CPU, seed=0))
        assert no_two_alike(found)
        # Both sides of each border in the bucket's tested numbers are among them.
        borders = {count for first in token_counts(*pair, 4, None) for count in (first - 1, first)}
        tested = {f"border {count}" for count in borders if rows.lo < count < (rows.hi or 0)}
        assert {name for name, _ in found if name.startswith("border")} == tested


@pytest.mark.parametrize("shape", [SHAPE, DECODE, replace(SHAPE, head_dim=2, num_heads=1, num_kv_heads=1)], ids=str)
def test_inputs_of_attention_have_names_of_their_own(shape: object) -> None:
    windowed = replace(DECODE, window=3000, context_bucket=Bucket.LE_8K)
    extend = replace(windowed, phase=Phase.EXTEND, query_bucket=Bucket.LE_128, head_dim=2)
    for each in (shape, windowed, extend):
        assert no_two_alike(names(cases(each, CPU, seed=0)))


def test_inputs_of_products_and_sums_have_names_of_their_own() -> None:
    for rows in (LinearRows.LE_1, LinearRows.LE_8, LinearRows.LE_256):
        product = LinearShape(Dtype.FP32, 24, 40, rows, has_bias=True)
        assert no_two_alike(names(linear_cases(product, operands_of(product, CPU, seed=0), seed=0)))
    for rows in TokenRows.up_to(512):
        summed = CollectiveShape(Dtype.FP32, 40, 2, Follows.NOTHING, rows)
        assert no_two_alike(names(collective_cases(summed, CPU, seed=0)))


@pytest.mark.parametrize("pair", [(3, 2), (5, 3)], ids=str)
def test_right_experts_pass_where_borders_are_neighbours(pair: tuple[int, int]) -> None:
    def run(hidden, experts, weights, expert_weights, activation, out) -> None:
        out.copy_(experts_eager(hidden, experts, weights, expert_weights, activation))

    checks = check_experts(run, experts_cases(mixture(*pair, TokenRows.LE_16), CPU, seed=0))
    assert [check.name for check in checks if not check.is_passed] == []


def test_two_inputs_of_one_name_are_no_shape() -> None:
    [case, *_] = experts_cases(mixture(3, 2, TokenRows.LE_16), CPU, seed=0)
    again = replace(case, seed=1)
    assert list(uniquely_named([case, again])) == [case, again]
    with pytest.raises(ValueError, match="two inputs of one shape are named 'fewest' with seed 0"):
        list(uniquely_named([case, again, case]))
