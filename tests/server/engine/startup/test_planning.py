"""Messages of a start that refuses to serve."""

from dataclasses import replace
from pathlib import Path

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


def test_a_refusal_names_paths_of_this_machine_and_phase(tmp_path: Path) -> None:
    """Every client of the API gets this text; of the catalog's 11 paths 2 are of a CPU."""
    plan = make_plan(
        shapes_needed(AttentionSignature(4, 2, 64), ServingLimits(128, 128, 16, Dtype.FP32, Dtype.FP32)),
        policy=Policy.REFUSE,
        fingerprint=read_fingerprint(CPU),
        device=CPU,
        matrix_dir=tmp_path,
        cache_dir=tmp_path,
        quarantined=frozenset(),
        progress=lambda *_: None,
    )
    with pytest.raises(Unservable) as caught:
        refuse_unserved(plan.decisions.values(), plan, Policy.REFUSE)
    assert str(caught.value) == (
        "under on-unproven=refuse no path may serve prefill fp32 h4:2 d64 q-le_128 c-le_128 causal and 2 more shapes: "
        "sdpa.cpu: unproven (it has not been measured); sdpa.math: unproven (it has not been measured)"
    )
    assert len(caught.value.plan[0].rejected) > 2  # GET /attention has all


def test_a_refusal_of_orders_names_the_operator_and_the_shapes(tmp_path: Path) -> None:
    paths = tuple(replace(path(name), order=order) for name, order in (("plain", None), ("chunks", "keys512")))
    shapes = shapes_needed(AttentionSignature(4, 2, 64), ServingLimits(128, 128, 16, Dtype.FP32, Dtype.FP32))
    plan = make_plan(
        shapes,
        policy=Policy.DEGRADE,  # which serves what is not proven, but nothing whose bits may change
        fingerprint=read_fingerprint(CPU),
        device=CPU,
        matrix_dir=tmp_path,
        cache_dir=tmp_path,
        quarantined=frozenset(),
        progress=lambda *_: None,
        paths=paths,
        reproducible=True,
    )
    with pytest.raises(Unservable) as caught:
        refuse_unserved(plan.decisions.values(), plan, Policy.DEGRADE)
    start = "under --reproducible no order has a path for every shape of attention fp32 h4:2 d64 causal: keys512 lacks "
    assert str(caught.value).startswith(start + ", ".join(str(shape) for shape in shapes))
    assert "plain: batch_variant (sums in no fixed order" in str(caught.value)


def test_a_row_of_the_plan_says_how_times_chose() -> None:
    [shape, *_] = shapes_needed(AttentionSignature(4, 2, 64), ServingLimits(128, 128, 16, Dtype.FP32, Dtype.FP32))
    note = "sdpa.math takes 10 us, sdpa.cpu 34 us: the faster serves"
    decision = Decision(shape, "sdpa.math", Status.PROVEN, "sdpa.math", (), (), None, (note,))
    [row] = plan_rows([decision], {})
    assert row.notes == (note,)
