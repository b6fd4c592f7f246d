"""A draft head's kernels: each launch is counted with its decision, and its passes are attested."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kernels.catalog import ALL_PATHS, PATHS
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Policy
from qualification.evidence.evidence import Evidence
from qualification.measure.qualify import Bench, Pair
from qualification.model.draft_head import DRAFT_HEAD
from server.engine.execution.head_steps import HeadSteps
from server.engine.scheduling.head_drafter import HeadDrafter, HeadRow
from server.engine.scheduling.sequence import Sequence as Request
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.warmup import synthetic_batch
from server.protocol.messages import DraftsPlan, SamplingParams, StepOutput, Submit
from support.engine.one_operator import HYBRID, small_engine
from support.qualification_fakes import evidence

# Of a mixture each pass has an operator more.
MIXTURE = {
    **HYBRID,
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
}
DRAFTS = '{"method": "mtp", "num_speculative_tokens": 2, "disable_by_batch_size": 2}'


def naming(pairs: list[Pair], bench: Bench, *, on_evidence: Callable[[Evidence], None], **_: object) -> None:
    """Prove every pair; of operators beside attention, by kernels of PyTorch."""
    for shape, path in pairs:
        kernels = {} if isinstance(shape, AttentionShape) else {"kernels": ("aten::bmm", "aten::mm")}
        on_evidence(evidence(shape, path, fingerprint=bench.fingerprint, **kernels))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    folder = tmp_path_factory.mktemp("model")
    given = {"policy": Policy.QUALIFY, "max_num_batched_tokens": 24, "speculative_config": DRAFTS}
    return small_engine(folder, MIXTURE, naming, **given)  # type: ignore[arg-type]


def served(built: BuiltEngine, num_prompts: int) -> list[StepOutput]:
    for index in range(num_prompts):
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        built.engine.submit(Submit(str(index), [*range(index, index + 20)], sampling))
    outputs = []
    while built.engine.has_work:
        output = built.engine.step()
        assert output is not None
        outputs.append(output)
    return outputs


def counted(outputs: list[StepOutput]) -> Counter[str]:
    found: Counter[str] = Counter()
    for output in outputs:
        for it in output.record.dispatches:
            found[it.path] += it.num_launches
    return found


def substituted(built: BuiltEngine, changed: Callable[[AnyPath], AnyPath]) -> None:
    """Serve by what `changed` makes of each path that serves now."""
    dispatcher = built.runner.dispatcher
    served_by = {decision.path for decision in dispatcher.all_decisions}
    for path in ALL_PATHS:
        if path.name in served_by:
            for table in (dispatcher.attention, *dispatcher.tables):
                table.substitute(changed(path))


def test_every_launch_of_model_and_head_is_counted(built: BuiltEngine) -> None:
    made: Counter[str] = Counter()

    def counting(path: AnyPath) -> AnyPath:
        def run(*given: Any, **named: Any) -> None:
            made[path.name] += 1
            path.run(*given, **named)  # type: ignore[misc]

        return replace(path, run=run)  # type: ignore[type-var]

    substituted(built, counting)
    outputs = served(built, 1)
    drafted = [it.record.drafts for it in outputs if it.record.drafts is not None]
    assert sum(sum(it.drafted) for it in drafted) > 0
    assert counted(outputs) == made
    assert len(made) == 4  # attention, products, experts, recurrence
    substituted(built, lambda path: path)


def test_drafts_are_off_above_a_number_of_sequences(built: BuiltEngine) -> None:
    assert built.ready.drafts == DraftsPlan("mtp", 2, 1)
    together = served(built, 2)
    assert sum(it.record.num_undrafted_steps for it in together) > 5
    assert not any(it.record.drafts for it in together)
    alone = served(built, 1)
    assert sum(it.record.num_undrafted_steps for it in alone) == 0
    assert any(it.record.drafts for it in alone)


def test_a_step_with_drafts_is_read_once(built: BuiltEngine) -> None:
    """Where a penalty needs what is drafted on the host, twice."""
    tokens, num_reads = built.runner.worker.tokens, 0
    copy = tokens.copy_to_host

    def counting(*given: Any) -> Callable[[], list[int]]:
        read = copy(*given)

        def counted_read() -> list[int]:
            nonlocal num_reads
            num_reads += 1
            return read()

        return counted_read

    tokens.copy_to_host = counting  # type: ignore[method-assign]
    for penalty, expected in ((0.0, 1), (0.5, 2)):
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, frequency_penalty=penalty)
        built.engine.submit(Submit("a", [*range(20)], sampling))
        found = set()
        while built.engine.has_work:
            before, output = num_reads, built.engine.step()
            if output is not None and output.record.drafts is not None:
                found.add(num_reads - before)
        assert found == {expected}
    del tokens.copy_to_host


def test_an_attestation_between_steps_leaves_drafts_alone(built: BuiltEngine) -> None:
    drafter, drafted = built.engine.drafter, list[list[list[int]]]()
    assert isinstance(drafter, HeadDrafter)
    draft = drafter.draft

    def noted(wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafted.append(draft(wanted))
        return drafted[-1]

    def answer(attested_behind: int | None) -> tuple[list[int], list[list[list[int]]]]:
        drafted.clear()
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        built.engine.submit(Submit("a", [*range(20)], sampling))
        tokens: list[int] = []
        for index in count():
            output = built.engine.step()
            if output is None:
                break
            tokens += [token for delta in output.deltas for token in delta.token_ids]
            if index == attested_behind:
                assert built.attestor.attest_all("request").result == "match"
        return tokens, drafted.copy()

    drafter.draft = noted  # type: ignore[method-assign]
    assert answer(2) == answer(None)
    assert max(map(len, drafted[3])) == 2
    drafter.draft = draft  # type: ignore[method-assign]


def test_passes_of_the_head_are_attested(built: BuiltEngine) -> None:
    report = built.attestor.attest_all("request")
    assert report.result == "match", report.batches
    of_head = [it for it in report.batches if it.phase == DRAFT_HEAD]
    assert len(of_head) == len({it.phase for it in report.batches}) - 1  # one in each phase of the model's
    assert min(it.explained.share for it in of_head if it.explained is not None) >= 0.99
    pages = built.runner.worker.kv.layers[-1].k.data_ptr()
    [math] = [path for path in PATHS if path.name == "sdpa.math"]

    def lying(path: AnyPath) -> AnyPath:
        def run(q: Any, k: Any, *given: Any, **named: Any) -> None:
            own = math.run if k.data_ptr() == pages and path.name == "sdpa.cpu" else path.run
            own(q, k, *given, **named)  # type: ignore[misc]

        return replace(path, run=run) if path.name == "sdpa.cpu" else path  # type: ignore[type-var]

    substituted(built, lying)
    found = built.attestor.attest_all("request")
    assert {it.phase for it in found.batches if it.result != "match"} == {DRAFT_HEAD}
    assert found.quarantined


def test_observed_steps_are_waited_for(built: BuiltEngine) -> None:
    """Else a GPU that is two steps behind would copy inputs that the host has written over."""
    worker, num_waits = built.runner.worker, count()
    worker.synchronize = lambda: next(num_waits)  # type: ignore[method-assign]
    batch = synthetic_batch([(3, 3)], 8, page=built.runner.num_pages)
    [seq], [table] = batch.sequences, batch.page_tables
    built.runner.observe(batch)
    HeadSteps(built.runner).observe(batch, [HeadRow(seq, 0, 0, 0, [0] * 3, table, num_drafting=0)])
    del worker.synchronize
    assert next(num_waits) == 2
