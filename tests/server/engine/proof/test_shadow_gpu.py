"""Shadow checks on a GPU: steps that would be graphs are checked, and a wrong path is quarantined."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import PATHS
from kernels.vocabulary.path import KernelPath
from qualification.decision.decision import Policy
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.startup.builder import BuiltEngine
from server.protocol.messages import SamplingParams, ShadowReport, Submit
from support.engine.built_engine import gpu_engine
from support.models.tiny_llama import TinyLlama

pytestmark = pytest.mark.gpu


@pytest.fixture
def built(tiny_llama: TinyLlama, tmp_path: Path) -> BuiltEngine:
    return gpu_engine(tiny_llama.folder, tmp_path, on_unproven=Policy.QUALIFY, matrix=str(tmp_path))


def reports(built: BuiltEngine, num_requests: int) -> list[ShadowReport]:
    """Return the reports of a check of every step that finds none waiting."""
    dispatcher = built.runner.dispatcher
    check = built.runner.shadow = ShadowCheck(
        dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True, rng=Random(0)
    )
    found = []
    for index in range(num_requests):
        prompt = [1 + (7 * index + n) % 90 for n in range(1 + 11 * index % 80)]
        built.engine.submit(Submit(f"r{id(check)}-{index}", prompt, SamplingParams(max_tokens=24, temperature=0.0)))
        while built.engine.has_work:
            built.engine.step(may_run_ahead=not check.has_sample)
            found.append(check.judge())
    return [report for report in found if report is not None]


def test_a_right_engine_has_no_mismatch_and_goes_on_replaying(built: BuiltEngine) -> None:
    assert built.runner.graphs is not None
    found = reports(built, 24)
    assert len(found) > 100
    assert {report.result for report in found} <= {"match", "skipped"}, [report.detail for report in found]
    built.runner.shadow = None
    before = built.runner.graphs.num_replays
    built.engine.submit(Submit("after", [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0)))
    while built.engine.has_work:
        built.engine.step()
    assert built.runner.graphs.num_replays > before


def spoilt(path: KernelPath) -> KernelPath:
    right = path.run
    assert right is not None

    def turned(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        right(q, k, v, batch, flags, out)
        out.mul_(1.05)

    return replace(path, run=turned)


def test_a_path_that_turns_wrong_is_quarantined(built: BuiltEngine) -> None:
    dispatcher = built.runner.dispatcher
    serving = {choice.use.path for choice in dispatcher.choices}
    for path in PATHS:
        if path.name in serving:
            dispatcher.substitute(spoilt(path))
    found = reports(built, 8)
    assert any(report.quarantined for report in found), [report.detail for report in found]
