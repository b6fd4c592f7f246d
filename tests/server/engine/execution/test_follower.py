"""A rank beside the first: it serves by rank 0's latest decisions, and keeps the inputs of the step before."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kernels.calls.batch import AttentionFlags
from kernels.calls.rows import SequenceRows
from kernels.catalog import path_named
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.decision.decision import Decision, Pairs, Status
from qualification.decision.model_shapes import shapes_needed, signature_of
from server.engine.execution.commands import Allocate, Decide, Launch, RankChecked, RankDecided, Report
from server.engine.execution.step_writer import StepWriter
from server.engine.follower import Follower, StepInputs
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.rank_check import NamedCall
from server.engine.startup.subject import kv_cache_of, load_weights, read_subject
from server.engine.startup.warmup import synthetic_batch
from server.model.decoder import Decoder
from server.settings import DeviceChoice, Settings
from support.models.tiny_llama import NUM_LAYERS, TinyLlama


def no_decision(shape: AttentionShape, _: Pairs, __: Pairs) -> Decision[AttentionShape]:
    raise AssertionError(f"a rank beside the first decides nothing: {shape}")


def test_a_rank_serves_by_the_latest_decisions(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Otherwise it sums what another kernel than rank 0's has computed."""
    settings = Settings(
        model=str(tiny_llama.folder), device=DeviceChoice.CPU, max_model_len=128, page_size=16, cache_dir=str(tmp_path)
    )
    subject, runs, factors = read_subject(settings), Counter[str](), list[float]()
    right = path_named("sdpa.cpu").run
    assert right is not None

    def counted(name: str) -> KernelPath:
        def run(*given: Any) -> None:
            runs[name] += 1
            right(*given)
            given[-1].mul_(factors[-1] if factors else 1)

        return replace(path_named("sdpa.cpu"), name=name, run=run)

    paths = [counted("first"), counted("second")]
    flags = [AttentionFlags(it.attention.scale, window=it.attention.window) for it in subject.config.layers]
    shapes = shapes_needed(signature_of(subject.config), subject.limits.serving)

    def decisions(name: str) -> dict[AttentionShape, Decision[AttentionShape]]:
        return {shape: Decision(shape, name, Status.PROVEN, name, (), (), None) for shape in shapes}

    def decide(name: str) -> Decide:
        return Decide([(str(shape), name) for shape in shapes])

    reports: list[Report] = []
    rank = Follower(
        Decoder(subject.config, load_weights(settings, subject)),
        subject.device,
        dispatcher=Dispatcher(decisions("first"), paths, flags, redecide=no_decision),
        kv_of=partial(kv_cache_of, subject),
        new_capture=lambda: pytest.fail("no graph on a CPU"),
        send=reports.append,
    )
    rank.obey(Allocate(4, 8, 0))
    buffer = StepWriter(page_size=16, num_pages=4, is_pinned=False).write(synthetic_batch([(3, 3)], 16), {})

    def launch(checked: NamedCall | None = None) -> Counter[str]:
        runs.clear()
        rank.inputs.take(buffer.layout.num_bytes)[:] = buffer.data.numpy().data
        layout = buffer.layout
        rank.obey(Launch(layout.parts, layout.num_sampled, None, buffer.has_pending, checked=checked))
        return runs

    assert launch() == {"first": NUM_LAYERS}
    checked = Phase.PREFILL.value, 1, SequenceRows(0, 0, 3, 3, 0)
    assert launch(NamedCall(1, *checked)) == {"first": NUM_LAYERS}  # of another rank
    assert not any(isinstance(it, RankChecked) for it in reports)
    for is_wrong in (False, True):
        factors.append(1.01 if is_wrong else 1.0)
        launch(NamedCall(0, *checked))
        report = reports[-1]
        assert isinstance(report, RankChecked)
        assert (report.judged.path, report.judged.layer) == ("first", 1)
        assert report.judged.is_mismatch is is_wrong
    factors.clear()
    rank.obey(decide("second"))  # a path was quarantined
    assert launch() == {"second": NUM_LAYERS}
    rank.obey(decide("first"))
    rank.obey(Allocate(4, 8, 0))  # a new worker begins with the latest
    assert launch() == {"first": NUM_LAYERS}
    names = {str(shape) for shape in shapes}
    decided = [it for it in reports if isinstance(it, RankDecided)]
    assert decided == [RankDecided(dict.fromkeys(names, path)) for path in ("first", "second", "first")]


def test_inputs_of_the_step_before_are_not_written_over() -> None:
    """The device may still be copying them."""
    inputs = StepInputs(is_pinned=False)
    kept = []
    for number in range(1, 6):
        inputs.take(8)[:] = bytes([number] * 8)
        kept.append(inputs.latest)
        assert inputs.latest.tolist() == [number] * 8
        if number > 1:
            assert kept[-2].tolist() == [number - 1] * 8
    inputs.take(4096)[:] = bytes([9] * 4096)  # more than there is room for
    assert kept[-1].tolist() == [5] * 8
