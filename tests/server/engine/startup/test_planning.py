"""Messages of a start that refuses to serve."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.system.device import read_fingerprint
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Policy, Status
from qualification.decision.model_shapes import AttentionSignature, ServingLimits, shapes_needed
from qualification.measure.start_plan import make_plan
from server.engine.startup.plan import Unservable, refuse_unserved
from server.protocol.plan_rows import plan_rows
from support.qualification_fakes import path

CPU = torch.device("cpu")


SHAPES = shapes_needed(AttentionSignature(4, 2, 64), ServingLimits(128, 128, 16, Dtype.FP32, Dtype.FP32))


def refused(folder: Path, policy: Policy, **options: Any) -> Unservable:
    """Return the refusal of a plan of attention on this machine, of which nothing was measured."""
    fingerprint = read_fingerprint(CPU)
    places = {"device": CPU, "matrix_dir": folder, "cache_dir": folder, "quarantined": frozenset()}
    plan = make_plan(
        SHAPES, policy=policy, fingerprint=fingerprint, progress=lambda *_: None, **places, **options
    )  # fmt: skip
    with pytest.raises(Unservable) as caught:
        refuse_unserved(plan.decisions.values(), plan, policy)
    return caught.value


def test_a_refusal_names_paths_of_this_machine_and_phase(tmp_path: Path) -> None:
    """Every client of the API gets this text; of the catalog's 11 paths 2 are of a CPU."""
    found = refused(tmp_path, Policy.REFUSE)
    assert str(found) == (
        "under on-unproven=refuse no path may serve prefill fp32 h4:2 d64 q-le_128 c-le_128 causal and 2 more shapes: "
        "sdpa.cpu: unproven (it has not been measured); sdpa.math: unproven (it has not been measured)"
    )
    assert len(found.plan[0].rejected) > 2  # GET /attention has all


def test_a_refusal_of_orders_names_the_operator_and_the_shapes(tmp_path: Path) -> None:
    """Under a policy that serves what is not proven, but nothing whose bits may change."""
    paths = tuple(replace(path(name), order=order) for name, order in (("plain", None), ("chunks", "keys512")))
    found = str(refused(tmp_path, Policy.DEGRADE, paths=paths, reproducible=True))
    start = "under --reproducible no order has a path for every shape of attention fp32 h4:2 d64 causal: keys512 lacks "
    assert found.startswith(start + ", ".join(map(str, SHAPES)))
    assert "plain: batch_variant (sums in no fixed order" in found


def test_a_row_of_the_plan_says_how_times_chose() -> None:
    note = "sdpa.math takes 10 us, sdpa.cpu 34 us: the faster serves"
    decision = Decision(SHAPES[0], "sdpa.math", Status.PROVEN, "sdpa.math", (), (), None, (note,))
    [row] = plan_rows([decision], {})
    assert row.notes == (note,)
