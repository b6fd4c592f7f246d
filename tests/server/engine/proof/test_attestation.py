"""Attestation of the real engine on a tiny Llama: it matches, and a path that runs another kernel is caught."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalog import PATHS, path_named
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from qualification.evidence.matrix import load_matrix, save_matrix
from server.engine.process import start
from server.engine.startup.warmup import probes_of
from server.protocol.messages import AttestationReport, Configure, EngineRefused, FromEngine, SamplingParams, Submit
from support.engine.attested import FLASH, Subject, build, refuses, settings_for
from support.models.tiny_llama import NUM_LAYERS, TinyLlama


def lying(name: str, other: str) -> list[KernelPath]:
    """The catalog, in which one path runs another one's kernel."""
    return [replace(path, run=path_named(other).run) if path.name == name else path for path in PATHS]


def details(report: AttestationReport) -> list[str | None]:
    return [batch.detail for batch in report.batches]


def test_the_start_attests_every_phase(subject: Subject) -> None:
    report = subject.built.attested
    assert report is not None
    assert (report.trigger, report.result, report.quarantined) == ("start", "match", [])
    assert [batch.phase for batch in report.batches] == [phase.value for phase in PLANNED_PHASES]
    for batch in report.batches:
        assert batch.kernels == {FLASH: NUM_LAYERS}
        assert batch.explained is not None
        assert batch.explained.unexplained == {}
        assert batch.explained.unproven.keys() == {"aten::mm"}  # of which there is no evidence
        assert all(batch.explained.seconds[it] > 0 for it in ("evidence", "named", "unproven"))
        assert 0 < batch.explained.share < 1


def test_the_time_of_a_fallback_is_in_the_kernels_of_its_evidence(subject: Subject) -> None:
    """Attention by plain PyTorch multiplies by operators that look like products: the call says whose they are."""
    it, dispatcher = subject.attestor()
    for phase in PLANNED_PHASES:
        dispatcher.quarantine("sdpa.cpu", phase)
    report = it.attest_all("request")
    assert (report.result, {path for batch in report.batches for path in batch.paths}) == ("match", {"sdpa.math"})
    for batch in report.batches:
        assert batch.explained is not None
        assert batch.explained.unexplained == {}
        assert batch.explained.unproven.keys() == {"aten::mm"}  # of products, of which there is no evidence
        assert batch.explained.seconds["evidence"] > 0


def test_an_unnamed_operator_is_unexplained(subject: Subject) -> None:
    path = path_named("sdpa.cpu")
    run = path.run
    assert run is not None

    def planted(*arguments: Any) -> None:
        run(*arguments)
        torch.erfinv(arguments[-1])

    it, _ = subject.attestor([replace(path, run=planted) if it is path else it for it in PATHS])
    report = it.attest_all("request")
    assert report.result == "match"  # erfinv is none of the operators that do attention
    for batch in report.batches:
        assert batch.explained is not None
        assert batch.explained.unexplained.keys() == {"aten::erfinv"}


@pytest.mark.first
def test_an_attestation_that_leaves_no_path_refuses_the_start(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """The machine's own evidence names other kernels than run, and proves no other path."""
    settings = settings_for(tiny_llama, tmp_path)
    build(settings)
    (file,) = tmp_path.glob("evidence-*.json")
    known = load_matrix(file).evidence.values()
    save_matrix(file, [replace(entry, kernels=("aten::mm",)) for entry in known if entry.path == "sdpa.cpu"])
    told: list[FromEngine] = []
    assert start(Configure(settings, []), told.append) is None
    report, refused = told[-2:]
    assert isinstance(report, AttestationReport)
    assert report.result == "mismatch"
    assert all("aten::mm" in (batch.detail or "") for batch in report.batches)
    assert isinstance(refused, EngineRefused)
    assert re.search(r"sdpa\.cpu: quarantined .* sdpa\.math: unproven", refused.message)
    assert {row.path for row in refused.plan} == {None}


def test_a_path_that_silently_runs_another_kernel_serves_no_more(subject: Subject) -> None:
    it, dispatcher = subject.attestor(lying("sdpa.cpu", "sdpa.math"))
    before = {str(choice.decision.shape) for choice in dispatcher.choices}
    report = it.attest_all("request")
    assert report.result == "mismatch"
    for batch in report.batches:
        assert batch.detail is not None
        assert batch.detail.startswith(f"sdpa.cpu did not launch {FLASH}")
    assert "aten::bmm" in str(details(report)[0])
    assert [batch.explained.seconds["evidence"] for batch in report.batches if batch.explained] == [0.0] * len(
        PLANNED_PHASES
    )
    assert set(report.quarantined) == {("sdpa.cpu", shape) for shape in before}
    assert {choice.use.path for choice in dispatcher.choices} == {"sdpa.math"}
    subject.built.engine.submit(Submit("a", [1, 2], SamplingParams(max_tokens=1)))
    output = subject.built.engine.step()
    assert output is not None
    assert output.record.quarantined == []  # it is no failed launch


def test_where_everything_is_served_the_lie_is_only_reported(subject: Subject) -> None:
    it, dispatcher = subject.attestor(lying("sdpa.cpu", "sdpa.math"), is_quarantining=False)
    assert it.attest_all("request").quarantined == []
    assert {choice.use.path for choice in dispatcher.choices} == {"sdpa.cpu"}


def test_a_path_that_chooses_kernels_is_seen_with_1_and_2(
    subject: Subject,
) -> None:
    decode = next(shape for shape in subject.decisions if shape.phase is Phase.DECODE)
    path = subject.decisions[decode].path
    assert path is not None
    only = {decode: subject.decisions[decode]}
    for of_two, sizes in ((frozenset(), [1]), ({path}, [1, 2])):
        probes = probes_of(only, page=3, page_size=16, max_len=128, of_two=of_two)
        assert [len(probe.sequences) for probe in probes] == sizes
        assert {page for probe in probes for table in probe.page_tables for page in table} == {3}


def test_two_probe_sequences_are_attested_as_one_is(subject: Subject) -> None:
    found, _ = subject.attestor(of_two={path.name for path in PATHS})
    report = found.attest_all("request")
    assert (report.result, len(report.batches)) == ("match", 2 * len(PLANNED_PHASES))


def test_probe_batches_change_no_token(subject: Subject) -> None:
    it, _ = subject.attestor()
    assert subject.tokens("a", lambda: it.attest_all("request")) == subject.tokens("b")


def test_one_batch_is_profiled_at_a_time(subject: Subject) -> None:
    it, _ = subject.attestor()
    assert it.poll() is None
    it.ask("request")
    assert [it.poll() is None for _ in range(2)] == [True, True]
    it.ask("request")  # while it is under way: that report answers this one too
    report = it.poll()
    assert report is not None
    assert len(report.batches) == len(PLANNED_PHASES)
    assert (it.is_busy, it.poll()) == (False, None)


def test_evidence_of_an_older_source_promises_no_new_kernels(subject: Subject) -> None:
    known = subject.built.attestor.judge.promises
    older = {key: replace(entry, source_digest="older") for key, entry in known.evidence.items()}
    for choice in subject.built.runner.dispatcher.choices:
        assert known.of(choice).is_measured
        assert not replace(known, evidence=older).of(choice).is_measured


def test_the_timer_asks_by_itself(subject: Subject) -> None:
    now = [0.0]
    it, _ = subject.attestor(interval_s=600.0, clock=lambda: now[0])
    now[0] = 599.0
    assert it.poll() is None
    assert not it.is_busy
    now[0] = 600.0
    reports = [it.poll() for _ in PLANNED_PHASES]
    assert reports[-1] is not None
    assert reports[-1].trigger == "timer"
    now[0] = 1199.0
    it.poll()
    assert not it.is_busy


def test_a_substitute_in_an_attestation_is_attested(subject: Subject) -> None:
    it, _ = subject.attestor([replace(path, run=refuses) if path.name == "sdpa.cpu" else path for path in PATHS])
    report = it.attest_all("request")
    assert report.result == "match"
    assert {path for path, _ in report.quarantined} == {"sdpa.cpu"}
    assert len(report.quarantined) == len(PLANNED_PHASES)
    assert [batch.paths for batch in report.batches] == [["sdpa.math"]] * len(PLANNED_PHASES)
