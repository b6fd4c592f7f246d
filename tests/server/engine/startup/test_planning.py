"""Messages of a start that refuses to serve."""

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


def test_a_row_of_the_plan_says_how_times_chose() -> None:
    [shape, *_] = shapes_needed(AttentionSignature(4, 2, 64), ServingLimits(128, 128, 16, Dtype.FP32, Dtype.FP32))
    note = "sdpa.math takes 10 us, sdpa.cpu 34 us: the faster serves"
    decision = Decision(shape, "sdpa.math", Status.PROVEN, "sdpa.math", (), (), None, (note,))
    [row] = plan_rows([decision], {})
    assert row.notes == (note,)
