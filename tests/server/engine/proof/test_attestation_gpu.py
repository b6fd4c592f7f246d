"""Attestation on a GPU: by the driver's record, graphs included, with nothing of the profiler left behind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.catalog import path_named
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine
from server.settings import LoadFormat
from support.engine.built_engine import gpu_engine
from support.models.tiny_llama import NUM_LAYERS, TinyLlama, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.long]


@pytest.fixture
def build(tiny_llama: TinyLlama, tmp_path: Path) -> Callable[..., BuiltEngine]:
    def made(has_graphs: bool, dummy: Path | None = None) -> BuiltEngine:
        load_format = LoadFormat.DUMMY if dummy else LoadFormat.AUTO
        proven = {"on_unproven": Policy.QUALIFY, "matrix": str(tmp_path), "load_format": load_format}
        return gpu_engine(dummy or tiny_llama.folder, tmp_path, cuda_graphs=has_graphs, **proven)

    return made


@pytest.mark.parametrize("has_graphs", [True, False])
def test_every_phase_matches_its_evidence(build: Callable[..., BuiltEngine], has_graphs: bool) -> None:
    built = build(has_graphs)
    report, again = built.attested, built.attestor.attest_all("request")
    assert report is not None
    assert (report.result, [batch.detail for batch in report.batches]) == ("match", [None] * len(report.batches))
    assert {batch.phase for batch in report.batches} == {phase.value for phase in PLANNED_PHASES}
    for batch in report.batches:
        for kernel, count in batch.kernels.items():  # the layers of a replay share a plan, and how its keys are split
            is_shared = batch.is_replay and kernel.endswith(("_plan", "_split"))
            assert count == (1 if is_shared else NUM_LAYERS), kernel
    decode = next(batch for batch in report.batches if batch.phase == "decode")
    assert decode.is_replay is has_graphs
    for batch in report.batches:
        assert batch.explained is not None
        assert batch.explained.unexplained == {}
        assert all(batch.explained.seconds[it] > 0 for it in ("evidence", "named"))
    # What was timed is not timed again.
    assert [batch.explained for batch in again.batches] == [batch.explained for batch in report.batches]


@pytest.mark.parametrize("has_graphs", [True, False])
def test_one_sequence_by_clusters_matches_too(
    build: Callable[..., BuiltEngine], tmp_path: Path, has_graphs: bool
) -> None:
    """The calls that evidence is made of are of several sequences but for one, and two launches serve several."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    tiny_config(hidden_size=512, num_heads=8, num_kv_heads=8).save_pretrained(tmp_path / "model")
    report = build(has_graphs, tmp_path / "model").attested
    assert report is not None
    decode = next(batch for batch in report.batches if batch.phase == "decode")
    assert (decode.result, decode.detail, decode.is_replay) == ("match", None, has_graphs)
    assert decode.kernels == {"hallmark_gluon_decode_cluster": NUM_LAYERS}


def test_a_path_that_runs_another_kernel_is_caught(build: Callable[..., BuiltEngine]) -> None:
    built = build(False)
    dispatcher = built.runner.dispatcher
    [served] = {it.use.path for it in dispatcher.choices if it.decision.shape.phase is Phase.PREFILL}
    other = "triton.prefill" if "gluon" in served else "gluon.prefill.hopper"
    dispatcher.substitute(replace(path_named(served), run=path_named(other).run))
    report = built.attestor.attest_all("request")
    assert report.result == "mismatch"
    assert report.quarantined
