"""The table of a mixture's experts: where paths change, and what follows a launch that fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.catalog import any_path_named
from kernels.experts.paths import ExpertsPath
from kernels.experts.shape import ExpertsShape
from kernels.experts.weights import ExpertWeights
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs, Status
from qualification.decision.model_shapes import experts_shape
from qualification.model.config import ExpertsConfig
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.rows_table import StepSizes
from server.model.load.load import load_config
from support.engine.one_operator import MIXTURE

BUCKETS = TokenRows.up_to(600)


def failing(*_: object) -> None:
    raise RuntimeError("too many resources requested for launch")


def path(name: str, run: object) -> ExpertsPath:
    known = any_path_named("torch.experts.cpu")
    assert isinstance(known, ExpertsPath)
    return ExpertsPath(name, known.tier, known.limits, known.source_digest, (), run)  # type: ignore[arg-type]


def filling(*given: Any) -> None:
    given[-1].fill_(2.0)


class Served:
    """The experts of a layer of a small mixture; the first path cannot be launched."""

    def __init__(self, folder: Path, *, may_replace: bool) -> None:
        (folder / "config.json").write_text(json.dumps(MIXTURE))
        config = load_config(folder)
        mixture = next(it.feed_forward for it in config.layers if isinstance(it.feed_forward, ExpertsConfig))
        shapes = [experts_shape(mixture, config.hidden_size, Dtype.FP32, rows) for rows in BUCKETS]

        def decide(shape: ExpertsShape, name: str) -> Decision[ExpertsShape]:
            return Decision(shape, name, Status.PROVEN, "first", (), (), None)

        def redecide(shape: ExpertsShape, _: Pairs, __: Pairs) -> Decision[ExpertsShape]:
            return decide(shape, "second")

        self.table = ExpertsTable(
            config,
            Dtype.FP32,
            {shape: decide(shape, "first") for shape in shapes},
            [path("first", failing), path("second", filling)],
            redecide=redecide,
            may_replace=may_replace,
        )
        weights = ExpertWeights(torch.zeros(5, 40, 24), torch.zeros(5, 24, 20))
        self.products = self.table.products_of(mixture, weights)

    def call(self, num_tokens: int) -> Tensor:
        visits = torch.zeros(num_tokens, 2, dtype=torch.int32)
        return self.products(torch.zeros(num_tokens, 24), visits, torch.zeros(num_tokens, 2))


def test_borders_are_the_first_numbers_of_tokens_of_a_path(tmp_path: Path) -> None:
    """Warm-up compiles what serves them: one less, and a request's first step compiles."""
    table = Served(tmp_path, may_replace=True).table
    assert table.borders == (1, 17, 129, 513)
    for border in table.borders:
        [here] = table.served(StepSizes(border))
        assert here.shape.rows.holds(border)
        assert border == 1 or table.served(StepSizes(border - 1)) != (here,)


def test_one_rank_replaces_experts_that_cannot_be_launched(tmp_path: Path) -> None:
    it = Served(tmp_path, may_replace=True)
    assert it.call(20).eq(2.0).all()
    [served], [other] = it.table.served(StepSizes(20)), it.table.served(StepSizes(3))
    assert (served.path, other.path) == ("second", "first")


def test_several_ranks_end_where_experts_cannot_be_launched(tmp_path: Path) -> None:
    """The others go on with the path that they know: their sums would be of two kernels."""
    it = Served(tmp_path, may_replace=False)
    with pytest.raises(DeviceLost, match="first failed to launch: too many resources") as lost:
        it.call(20)
    [served] = it.table.served(StepSizes(20))
    assert lost.value.suspects == [("first", str(served.shape))]
    assert served.path == "first"
