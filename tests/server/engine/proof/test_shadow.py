"""Shadow checks of a real engine on a tiny Llama: a path that turns wrong in service is seen, a right one is not."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import IndexedFlags
from kernels.calls.rows import sequences_of
from kernels.catalog import PATHS, path_named
from kernels.reference.oracle import attention_oracle
from kernels.vocabulary.path import KernelPath, RunAttention
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase
from qualification.decision.decision import Decision
from qualification.measure.faults.indexed_faults import IndexedFault, trial_shapes_of_indexers, wrong_indexed_kernel
from qualification.measure.inputs.attention_inputs import cases
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.table import OperatorChoice
from server.engine.proof.rank_check import JudgedCall, RankAnswers
from server.engine.proof.shadow_check import ALERT_S, MEMORY_S, ShadowBudget, ShadowCheck
from server.engine.proof.shadow_sample import MOST_ROWS, drawn_rows, take_sample
from server.protocol.messages import PathUse, SamplingParams, ShadowReport, Submit
from support.engine.attested import Subject
from support.models.tiny_llama import NAN_TOKEN, NUM_LAYERS

Spoil = Callable[[Tensor], None]
LATER_S = 100.0  # after the interval and after the dense checks that follow a mismatch


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Turning:
    """The catalog; once `spoil` is set, its path for decode, prefill and chunks spoils what it has computed."""

    spoil: Spoil | None = None
    phases: tuple[Phase, ...] = tuple(PLANNED_PHASES)

    def paths(self) -> list[KernelPath]:
        return [replace(path, run=self.wrapped(path.run)) if path.name == "sdpa.cpu" else path for path in PATHS]

    def wrapped(self, run: RunAttention | None) -> RunAttention:
        assert run is not None

        def turning(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
            run(q, k, v, batch, flags, out)
            if self.spoil is not None and self.phase_of(batch) in self.phases:
                self.spoil(out)

        return turning

    def phase_of(self, batch: AttentionBatch) -> Phase:
        if not batch.is_paged:
            return Phase.PREFILL
        return Phase.DECODE if batch.max_seqlen_q == 1 else Phase.EXTEND


def scale(out: Tensor) -> None:
    out.mul_(1.01)


def leave_tile(out: Tensor) -> None:
    """Eight rows of one head hold what some other step has left there."""
    out[:8, 1] = torch.linspace(-1, 1, out.shape[2])


def confuse_head(out: Tensor) -> None:
    out[:, 1] = out[:, 0]


@dataclass
class Served:
    """A real engine whose paths may turn wrong, with a check of every step."""

    subject: Subject
    turning: Turning = field(default_factory=Turning)
    clock: Clock = field(default_factory=Clock)
    seed: int = 1
    is_quarantining: bool = False
    step_s: float = LATER_S

    def __post_init__(self) -> None:
        runner = self.subject.built.runner
        flags = runner.dispatcher.flags
        paths = self.turning.paths()
        runner.worker.dispatcher = Dispatcher(self.subject.decisions, paths, flags, redecide=self.subject.redecide)
        self.dispatcher = runner.dispatcher
        self.check_every(0.0)
        self.clock.now += 1.0  # nothing is paid for at the very start
        self._draw = Random(self.seed)
        self._names = 0

    def check_every(self, interval_s: float, budget: float = 1e9) -> None:
        """Check steps anew, so often."""
        self.check = self.subject.built.runner.shadow = ShadowCheck(
            self.dispatcher,
            budget=budget,
            interval_s=interval_s,
            is_quarantining=self.is_quarantining,
            clock=self.clock,
            rng=Random(self.seed),
        )

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self._names += 1
        # Of their own: pages of an earlier test's prompts would make chunks of them.
        salt = f"{id(self)}{self._names}".encode()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.subject.built.engine.submit(Submit(f"{id(self)}-{self._names}", prompt, sampling, salt))

    def reports(self, num_reports: int, *, num_tokens: int = 8) -> Iterator[ShadowReport]:
        """Yield the reports of so many checks, over requests of random lengths, four at a time."""
        engine = self.subject.built.engine
        while num_reports > 0:
            if not engine.has_work:
                for _ in range(4):
                    prompt = [self._draw.randrange(NAN_TOKEN) for _ in range(self._draw.randrange(1, 90))]
                    self.submit(prompt, self._draw.randrange(1, num_tokens + 1))
            engine.step()
            self.clock.now += self.step_s
            report = self.check.judge()
            if report is not None and num_reports > 0:
                num_reports -= 1
                yield report
        while engine.has_work:
            engine.step()
        self.check.judge()


def test_a_right_engine_has_no_mismatch(subject: Subject) -> None:
    reports = list(Served(subject).reports(150))
    assert {report.result for report in reports} <= {"match", "skipped"}
    matches = [report for report in reports if report.factor is not None]
    assert len(matches) > 140
    assert {report.phase for report in matches} >= {"prefill", "decode"}
    assert {report.layer for report in matches} == set(range(NUM_LAYERS))
    assert {report.head for report in matches} == set(range(4))
    assert max(report.factor for report in matches if report.factor is not None) < 1


# A fault of one head shows in half of the checks of decode: of two KV heads one is drawn. 60 checks without two
# mismatches of a phase have a probability below 1e-9.
@pytest.mark.parametrize(("spoil", "phases"), [(scale, 0), (leave_tile, 0), (confuse_head, 0), (scale, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_a_path_that_turns_wrong_in_service_is_quarantined(
    subject: Subject, spoil: Spoil, phases: int, seed: int
) -> None:
    turning = Turning(phases=(Phase.DECODE,) if phases else tuple(PLANNED_PHASES))
    it = Served(subject, turning, seed=seed, is_quarantining=True)
    assert {report.result for report in it.reports(20)} <= {"match", "skipped"}
    it.clock.now += 3600
    turning.spoil = spoil
    reports = []
    for report in it.reports(60):
        reports.append(report)
        if report.quarantined:
            break
    of_phase = [each.result for each in reports if each.phase == report.phase]
    assert (of_phase.count("mismatch"), of_phase[-1], report.path) == (2, "mismatch", "sdpa.cpu")
    served = {choice.decision.shape.phase.value: choice.use.path for choice in it.dispatcher.choices}
    assert served[report.phase] == "sdpa.math"
    assert {shape.split()[0] for _, shape in report.quarantined} == {report.phase}


def test_a_mismatch_says_where_and_by_how_much(subject: Subject) -> None:
    it = Served(subject, Turning(scale))
    report = next(iter(it.reports(1)))
    assert (report.result, report.quarantined) == ("mismatch", [])
    assert report.factor is not None
    assert report.factor > 10
    words = f"sdpa.cpu {report.phase}, layer {report.layer}, head {report.head}, position {report.position}, column "
    assert (report.detail or "").startswith(words)
    assert "the output is 1.01" in (report.detail or "")


def test_mismatches_of_another_rank_quarantine(subject: Subject) -> None:
    """The second of another input does, as on this one."""
    others, dispatcher = RankAnswers(2), Served(subject).dispatcher
    check = ShadowCheck(dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True, others=others)
    found = []
    for digest in ("a", "a", "b"):
        check.wait_for_answer()
        assert check.judge() is None
        assert (check.has_sample, check.is_due) == (True, False)
        others.put(JudgedCall(1, "sdpa.cpu", "decode", "decode", layer=0, factor=2.0, detail="off", digest=digest))
        assert check.is_due
        report = check.judge()
        assert report is not None
        assert (report.result, report.rank, report.detail, check.has_sample) == (
            *("mismatch", 1, "on rank 1: off"),
            False,
        )
        found.append(bool(report.quarantined))
    assert found == [False, False, True]


def test_under_degrade_nothing_is_quarantined(subject: Subject) -> None:
    it = Served(subject, Turning(scale), is_quarantining=False)
    reports = list(it.reports(10))
    assert {report.result for report in reports} == {"mismatch"}
    assert [pair for report in reports for pair in report.quarantined] == []


def mismatches(it: Served, *times: float) -> list[bool]:
    """Return whether a mismatch at each of these times quarantines."""
    found = []
    for at in times:
        it.clock.now = at
        report = next(report for report in it.reports(100) if report.result == "mismatch")
        found.append(bool(report.quarantined))
    return found


def test_two_mismatches_quarantine_only_within_the_hour(subject: Subject) -> None:
    def new() -> Served:
        return Served(subject, Turning(scale, phases=(Phase.DECODE,)), is_quarantining=True, step_s=0.0)

    assert mismatches(new(), 1.0, MEMORY_S + 2, 2 * MEMORY_S + 3) == [False, False, False]
    assert mismatches(new(), 1.0, MEMORY_S) == [False, True]


def test_one_computation_that_is_checked_twice_counts_once(subject: Subject) -> None:
    """Kernels are deterministic: the same prompt again has the same error, and says nothing new."""
    it = Served(subject, Turning(scale), is_quarantining=True)
    one = sample_of(Phase.PREFILL, flags=AttentionFlags(0.25), spoil=scale)
    other = sample_of(Phase.PREFILL, flags=AttentionFlags(0.25), spoil=scale, seed=1)
    quarantined = []
    for sample in (one, one, other):
        it.check.take_sample(sample.path, sample.lane, 0, lambda _, taken=sample: taken)  # type: ignore[misc]
        report = it.check.judge()
        assert report is not None
        quarantined.append(bool(report.quarantined))
    assert quarantined == [False, False, True]


def test_inputs_that_are_not_finite_are_skipped(subject: Subject) -> None:
    it = Served(subject)
    it.submit([1, NAN_TOKEN, 2], 4)
    it.subject.built.engine.step()
    report = it.check.judge()
    assert report is not None
    assert (report.result, report.factor, report.num_rows) == ("skipped", None, 0)
    assert "not finite" in (report.detail or "")


def test_an_output_that_is_not_finite_is_wrong() -> None:
    found = sample_of(Phase.DECODE, AttentionFlags(0.25), lambda out: out.fill_(torch.nan)).judge(Random(0))
    assert found.is_mismatch
    assert "not finite" in (found.detail or "")


class Full:
    """Pages of which no copy can be made."""

    shape = (4, 16, 2, 16)

    def __getitem__(self, _: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")


def test_a_sample_for_which_there_is_no_memory_is_skipped(subject: Subject) -> None:
    it = Served(subject)
    batch, q, *_ = part_of(Phase.DECODE, torch.Generator(), num_heads=4, num_kv_heads=2)
    part = PhasePart(Phase.DECODE, slice(0, 3), batch, 3, 3)
    full: Any = Full()
    it.check.take(choice_of(Phase.DECODE), part, 0, sequences_of(batch)[0], tensors=(q, full, full, q))
    report = it.check.judge()
    assert report is not None
    assert (report.result, report.path, report.phase) == ("skipped", "sdpa.cpu", "decode")
    assert "Tried to allocate 64.00 MiB" in (report.detail or "")
    assert not it.check.has_sample


def test_pages_may_be_reused_before_a_sample_is_judged(subject: Subject) -> None:
    it = Served(subject)
    engine, runner = it.subject.built.engine, it.subject.built.runner
    it.submit(list(range(40)), 20)
    for _ in range(4):
        engine.step()
        if runner.shadow is not None and not it.check.has_sample:
            it.clock.now += LATER_S
    assert it.check.has_sample
    engine.cancel(f"{id(it)}-1")
    for pages in runner.worker.kv.tensors:
        pages.fill_(7.0)
    report = it.check.judge()
    assert report is not None
    assert report.result == "match"
    for pages in runner.worker.kv.tensors:
        pages.zero_()
    while engine.has_work:
        engine.step()


def test_attested_batches_are_not_checked(subject: Subject) -> None:
    attestor, dispatcher = subject.attestor()
    check = subject.built.runner.shadow = ShadowCheck(dispatcher, budget=1e9, interval_s=0.0, is_quarantining=False)
    assert attestor.attest_all("request").result == "match"
    assert not check.has_sample


@pytest.mark.parametrize(("cost_s", "share"), [(0.001, 0.005), (0.04, 0.005), (0.3, 0.005), (30.0, 0.005), (0.05, 0.1)])
def test_checks_take_no_more_than_their_share(cost_s: float, share: float) -> None:
    """Simulate an hour in which the engine could check every 10 ms; cost and share of the time since ready."""
    clock, spent_s, num_checks = Clock(), 0.0, 0
    budget = ShadowBudget(share, clock)
    while clock.now < 3600:
        clock.now += 0.01
        if budget.allows:
            budget.begin()
            budget.spend(cost_s)
            spent_s, num_checks = spent_s + cost_s, num_checks + 1
            assert spent_s <= share * clock.now + cost_s
    assert num_checks >= share * 3600 / cost_s * 0.9 - 1


def test_a_quiet_night_saves_up_no_more_than_ten_minutes() -> None:
    clock, num_checks = Clock(), 0
    budget = ShadowBudget(0.005, clock)
    clock.now = 8 * 3600.0
    while budget.allows:
        budget.begin()
        budget.spend(0.01)
        num_checks += 1
    assert num_checks * 0.01 == pytest.approx(0.005 * 600, rel=0.01)


def test_a_budget_of_0_checks_nothing(subject: Subject) -> None:
    it = Served(subject, is_quarantining=True)
    it.check_every(0.0, budget=0.0)
    it.submit([1, 2], 3)
    while it.subject.built.engine.has_work:
        it.clock.now += LATER_S
        it.subject.built.engine.step()
    assert it.check.judge() is None


def test_a_request_now_and_then_is_checked_in_every_phase(subject: Subject) -> None:
    """A check is due at the first step of each request, which is always of its prompt."""
    it = Served(subject, step_s=0.05, seed=0)
    it.check_every(10.0)
    phases = Counter[str]()
    for index in range(40):
        it.clock.now += 11.0
        it.submit([1 + index, 2, 3], 4)
        while subject.built.engine.has_work:
            subject.built.engine.step()
            it.clock.now += it.step_s
            report = it.check.judge()
            phases.update([] if report is None else [report.phase])
    assert min(phases["prefill"], phases["decode"]) >= 5


def test_checks_come_more_often_after_a_mismatch(subject: Subject) -> None:
    turning = Turning()
    it = Served(subject, turning, step_s=1.0, seed=0)
    it.check_every(10.0)
    it.clock.now = 1.0

    def times(num: int) -> list[float]:
        return [it.clock.now for _ in it.reports(num, num_tokens=4)]

    calm = times(4)
    assert all(10.0 <= b - a <= 24.0 for a, b in pairwise(calm))  # one that waits for a phase has another interval
    turning.spoil, it.step_s = scale, 0.09
    first, *dense = times(20)
    assert all(0.0999 < b - a < ALERT_S for a, b in pairwise([first, *dense]))
    assert dense[-1] - first < 10.0 * 19 / 2


def test_a_lasting_mismatch_blinds_no_check_of_others(subject: Subject) -> None:
    """Where nothing is quarantined, each mismatch of the prompts renews the dense checks of prompts."""
    it = Served(subject, Turning(scale, phases=(Phase.PREFILL,)), step_s=0.4, seed=0)
    it.check_every(4.0)
    results = Counter((report.phase, report.result) for report in it.reports(120))
    assert results["prefill", "mismatch"] > 30  # most checks are of what is wrong
    assert results["decode", "match"] >= 5
    assert results["prefill", "match"] == results["decode", "mismatch"] == 0


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65, 1000, 8192])
def test_drawn_rows_are_spread_over_all(num_rows: int) -> None:
    rows = drawn_rows(num_rows, MOST_ROWS, Random(0))
    assert len(rows) == min(num_rows, MOST_ROWS)
    assert rows == sorted(set(rows))
    assert 0 <= rows[0] < max(1, num_rows / 32)
    assert rows[-1] >= num_rows - max(1, num_rows / 32)


# --- samples of every kind of layer ---------------------------------------------------------------------------------


def part_of(phase: Phase, generator: torch.Generator, *, num_heads: int, num_kv_heads: int) -> tuple[Any, ...]:
    """A batch of three sequences with its q, k and v; pages in random order, NaN where nothing may be read."""
    lens = {Phase.PREFILL: [(9, 9), (70, 70), (33, 33)], Phase.EXTEND: [(9, 40), (70, 90), (5, 33)]}
    rows = lens.get(phase, [(1, 40), (1, 90), (1, 17)])
    head_dim, page_size = 16, 8

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    edges = torch.tensor([0, *torch.tensor([query for query, _ in rows]).cumsum(0).tolist()], dtype=torch.int32)
    q = random(int(edges[-1]), num_heads, head_dim)
    longest = max(context for _, context in rows)
    if phase is Phase.PREFILL:
        batch = AttentionBatch(edges, longest, longest, cu_seqlens_k=edges)
        return batch, q, random(q.shape[0], num_kv_heads, head_dim), random(q.shape[0], num_kv_heads, head_dim)
    k, v = (torch.full((64, page_size, num_kv_heads, head_dim), torch.nan) for _ in range(2))
    free = torch.randperm(64, generator=generator).tolist()
    table = torch.full((len(rows), 12), -1, dtype=torch.int32)
    for index, (_, context) in enumerate(rows):
        for place in range(-(-context // page_size)):
            page, held = free.pop(), min(page_size, context - place * page_size)
            table[index, place] = page
            k[page, :held], v[page, :held] = (random(held, num_kv_heads, head_dim) for _ in range(2))
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    batch = AttentionBatch(edges, max(query for query, _ in rows), longest, page_table=table, context_lens=contexts)
    return batch, q, k, v


def sample_of(phase: Phase, flags: AttentionFlags, spoil: Spoil | None = None, seed: int = 0) -> Any:
    """Sample a right path's output, spoilt if asked for; sinks are put into `flags` where they are wanted."""
    generator = torch.Generator().manual_seed(seed)
    batch, q, k, v = part_of(phase, generator, num_heads=6, num_kv_heads=2)
    out = attention_oracle(q, k, v, batch, flags, dtype=torch.float32)
    if spoil is not None:
        spoil(out)
    part = PhasePart(phase, slice(0, q.shape[0]), batch, batch.num_seqs, q.shape[0])
    sequence = sequences_of(batch)[1]
    taken = take_sample(choice_of(phase), part, 0, sequence, tensors=(q, k, v, out), flags=flags, rng=Random(seed))
    for tensor in (q, k, v, out):  # the next step
        tensor.fill_(torch.nan)
    return taken


def choice_of(phase: Phase) -> Choice:
    path = path_named("sdpa.cpu")
    decision: Decision = None  # type: ignore[assignment] -- not looked at
    assert path.run is not None
    return OperatorChoice(decision, path.run, PathUse(phase.value, path.name, "proven", []), is_capturable=True)


def flags_of(kind: str) -> AttentionFlags:
    if kind == "sinks":
        return AttentionFlags(0.25, sinks=torch.linspace(-2, 3, 6))
    if kind == "window":
        return AttentionFlags(0.25, window=13)
    if kind == "softcap":
        return AttentionFlags(0.25, softcap=2.0)
    return AttentionFlags(0.25)


@pytest.mark.parametrize("kind", ["plain", "sinks", "window", "softcap"])
@pytest.mark.parametrize("phase", PLANNED_PHASES)
def test_every_kind_of_layer_is_judged_as_it_is(phase: Phase, kind: str) -> None:
    flags = flags_of(kind)
    right = sample_of(phase, flags).judge(Random(0))
    assert right.factor is not None
    assert right.factor < 0.5
    assert sample_of(phase, flags, scale).judge(Random(0)).is_mismatch
    if kind != "plain":  # a layer that is judged as another one would be called wrong
        taken = replace(sample_of(phase, flags), flags=AttentionFlags(0.25))
        assert taken.judge(Random(0)).is_mismatch


# --- keys that an indexer chooses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [IndexedFault.NONE, IndexedFault.OTHER_WEIGHT, IndexedFault.ALL_KEYS])
@pytest.mark.parametrize("phase", PLANNED_PHASES)
def test_the_choice_of_keys_is_judged_with_its_attention(phase: Phase, fault: IndexedFault) -> None:
    shape = next(it for it in trial_shapes_of_indexers(Dtype.FP32) if it.phase is phase)
    case = next(it for it in cases(shape, torch.device("cpu"), seed=3) if it.name == "choice_edges")
    assert isinstance(case.flags, IndexedFlags)
    out = torch.zeros_like(case.q[..., : case.v.shape[-1]])
    wrong_indexed_kernel(fault)(case.q, case.k, case.v, case.batch, case.flags, out)  # writes the choice, too
    sequence = max(sequences_of(case.batch), key=lambda it: it.num_keys)
    index, rows = case.flags.index, case.q.shape[0]
    part = PhasePart(phase, slice(0, rows), case.batch, case.batch.num_seqs, rows, index=index)
    of_layer = AttentionFlags(case.flags.scale)
    tensors = case.q, case.k, case.v, out
    taken = take_sample(choice_of(phase), part, 0, sequence, tensors=tensors, flags=of_layer, rng=Random(1))
    index.chosen.fill_(0)  # the next step
    judged = taken.judge(Random(0))
    assert judged.is_mismatch is (fault is not IndexedFault.NONE)
    assert "chooses key" in str(judged.detail) or fault is not IndexedFault.OTHER_WEIGHT
