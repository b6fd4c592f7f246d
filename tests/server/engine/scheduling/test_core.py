import pytest

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.vocabulary.shape import Phase
from server.engine.execution.sampling import is_plain_greedy, row_sampling
from server.engine.scheduling.engine import MOST_PROMPT_LOGPROBS, Engine, EngineOptions
from server.engine.scheduling.integrity import IntegrityError
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError, StepStatistics
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch
from server.http.generation.requests import MAX_LOGPROBS
from server.protocol import wire
from server.protocol.messages import (
    FinishReason,
    SamplingParams,
    StepOutput,
    StepRecord,
    Submit,
    TokenDelta,
    TokenScores,
)
from support.engine.fake_runner import Done, FakeRunner

EOS = 99


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def engine(runner: FakeRunner | None = None, *, pages: int = 32, model_len: int = 64, seqs: int = 8) -> Engine:
    scheduler = Scheduler(SchedulerLimits(model_len, seqs, 32), PagePool(pages, 4))
    return Engine(scheduler, runner or FakeRunner(), EngineOptions(100, (EOS,), seed=0), clock=Clock())


def submit(name: str, num_prompt: int = 3, **sampling: object) -> Submit:
    return Submit(name, list(range(num_prompt)), SamplingParams(**{"max_tokens": 4, **sampling}))  # type: ignore[arg-type]


def drain(subject: Engine) -> dict[str, list[TokenDelta]]:
    """Step until idle; every delta by request."""
    found: dict[str, list[TokenDelta]] = {}
    while subject.has_work:
        output = subject.step()
        assert output is not None
        for delta in output.deltas:
            found.setdefault(delta.request_id, []).append(delta)
    return found


def drain_one(subject: Engine) -> StepRecord:
    subject.submit(submit("one"))
    output = subject.step()
    assert output is not None
    return output.record


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_an_eos_token_stops_unless_it_is_ignored() -> None:
    runner = FakeRunner()
    runner.answer = lambda batch, row: EOS if batch.context_lens[row] == 4 else 1
    subject = engine(runner)
    subject.submit(submit("a"))
    subject.submit(submit("b", ignore_eos=True))
    subject.submit(submit("c", min_tokens=3))
    found = drain(subject)
    assert tokens(found["a"]) == [1, EOS]
    assert found["a"][-1].finish_reason is FinishReason.STOP
    assert tokens(found["b"]) == [1, EOS, 1, 1]
    assert found["c"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_may_come_before_min_tokens(temperature: float) -> None:
    is_banned, is_likeliest = [], []

    def answer(batch: Batch, row: int) -> int:
        seq = batch.sequences[row]
        is_banned.append(EOS in row_sampling(seq, len(seq.tokens)).banned_ids)
        is_likeliest.append(is_plain_greedy(seq))
        return 1

    runner = FakeRunner()
    runner.answer = answer
    subject = engine(runner)
    subject.submit(submit("a", min_tokens=2, temperature=temperature))
    drain(subject)
    assert is_banned == [True, True, False, False]
    assert is_likeliest == [False, False, temperature == 0, temperature == 0]


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ([], "invalid_value", ""),
        ([5, 101, 100], "invalid_value", "prompt token 101 is outside the vocabulary of 100"),
        ([-1], "invalid_value", "prompt token -1 is outside"),
        ([2**64 - 1], "invalid_value", "prompt token "),
        ([1] * 2000 + [100], "invalid_value", "prompt token 100 is"),
        ([1] * 2000 + [2**64 - 1], "invalid_value", "prompt token "),
        ([1] * 2000, "context_length_exceeded", "the prompt has 2000 tokens, "),
        ([1] * 64, "context_length_exceeded", "the prompt has 64 tokens, the limit is 64 with one to generate"),
    ],
)
def test_a_bad_prompt_fails_alone(prompt: list[int], code: str, message: str) -> None:
    subject = engine()
    subject.submit(submit("good"))
    subject.submit(Submit("bad", prompt, SamplingParams(max_tokens=1)))
    found = drain(subject)
    assert [(d.finish_reason, d.error_code) for d in found["bad"]] == [(FinishReason.ERROR, code)]
    assert str(found["bad"][0].error_message).startswith(message)
    assert tokens(found["good"]) == [3, 4, 5, 6]


def test_scores_that_would_fill_no_message_are_refused() -> None:
    subject = engine()
    subject.submit(Submit("a", [1] * 74_899, SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS)))
    assert drain(subject)["a"][0].error_message == (
        "the prompt has 74899 tokens, log probabilities beside 20 likeliest are given of at most 74898"
    )
    for num_top in (0, 1, MAX_LOGPROBS):
        chunk, most = 8192, MOST_PROMPT_LOGPROBS // (1 + num_top)
        part = TokenScores.of(1, num_top, [[-1.5, *[2**31] * (1 + num_top), *[-1.5] * num_top]] * chunk)
        output = StepOutput(drain_one(subject), [TokenDelta("a", [1], scores=(part,) * (most // chunk + 1))])
        assert len(wire.frame(output)) < wire.MAX_FRAME_BYTES  # with short ones beside it


@pytest.mark.parametrize(("answer", "num_hits"), [(1, 8), (None, 0)])
def test_pages_of_a_failed_request_are_not_found(answer: int | None, num_hits: int) -> None:
    runner = FakeRunner()
    runner.answer = lambda batch, row: answer if batch.sequences[row].request_id == "first" else 1
    scheduler = Scheduler(SchedulerLimits(64, 8, 32), PagePool(32, 4), shares_pages=True)
    subject = Engine(scheduler, runner, EngineOptions(100, (EOS,), seed=0), clock=Clock())
    subject.submit(submit("first", 10, max_tokens=1))
    drain(subject)
    subject.submit(submit("heir", 10))
    output = subject.step()
    assert output is not None
    assert output.record.num_prefix_hit_tokens == num_hits


def test_rows_that_cannot_be_computed_end_and_the_others_go_on() -> None:
    class Failing(FakeRunner):
        def launch(self, batch: Batch) -> Done:
            if batch.num_prefill and batch.num_rows > 1:
                rows = batch.rows_of(Phase.PREFILL)
                raise BatchError("internal_error", "no path", rows, [("p", "s")], oom_stage="prefill")
            return super().launch(batch)

    subject = engine(Failing())
    subject.submit(submit("a"))
    subject.step()
    subject.submit(submit("b"))
    output = subject.step()
    assert output is not None
    assert [(d.request_id, d.error_code) for d in output.deltas] == [("b", "internal_error")]
    assert output.record.quarantined == [("p", "s")]
    assert output.record.oom_stage == "prefill"
    assert tokens(drain(subject)["a"]) == [4, 5, 6]


def test_the_log_of_a_request_that_ends_early_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    runner = FakeRunner()
    runner.answer = lambda *_: None
    subject = engine(runner)
    message = Submit("sick", [1, 2], SamplingParams(max_tokens=4), traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
    subject.submit(message)
    subject.step()
    [record] = [it for it in caplog.records if it.name == "server.engine.scheduling.engine"]
    assert (record.__dict__["request_id"], record.__dict__["trace_id"]) == ("sick", trace_id)
    assert record.__dict__["code"] == "nonfinite_logits"


def test_cancelling_ends_requests_and_frees_their_pages() -> None:
    subject = engine(seqs=1)
    subject.submit(submit("a"))
    subject.submit(submit("b"))
    subject.step()
    subject.cancel("a")
    subject.cancel("b")
    subject.cancel("nobody")
    output = subject.step()
    assert output is not None
    assert [(d.request_id, d.finish_reason) for d in output.deltas] == [
        ("a", FinishReason.CANCELLED),
        ("b", FinishReason.CANCELLED),
    ]
    assert output.record.num_pages_used == 0
    assert not subject.has_work


def test_the_first_token_has_times_and_each_decision_once() -> None:
    subject = engine()
    subject.submit(submit("a", 40))
    found = drain(subject)["a"]
    times = found[0].times
    assert times is not None
    assert times.submitted_at < times.scheduled_at < times.first_token_at
    assert times.num_chunks == 2
    assert all(delta.times is None for delta in found[1:])
    phases = [[use.phase for use in delta.path_uses] if delta.path_uses else None for delta in found]
    assert phases == [["prefill", "extend"], ["prefill", "extend", "decode"], None, ["prefill", "extend", "decode"]]


def test_lost_pages_are_found_when_the_work_is_done() -> None:
    pool = PagePool(8, 4)
    runner = FakeRunner()
    subject = Engine(Scheduler(SchedulerLimits(16, 2, 16), pool), runner, EngineOptions(100, (), seed=0))
    subject.submit(submit("a", max_tokens=1))
    subject.step()
    pool.grow("ghost", 1)
    with pytest.raises(IntegrityError, match="ghost"):
        subject.step()


def test_seeds_are_drawn_only_for_requests_that_bring_none() -> None:
    runner = FakeRunner()
    subject = engine(runner)
    for name, seed in (("a", 5), ("b", None), ("c", None)):
        subject.submit(submit(name, max_tokens=1, seed=seed))
    drain(subject)
    seeds = [seq.seed for batch in runner.batches for seq in batch.sequences]
    assert seeds[0] == 5
    assert seeds[1] != seeds[2]


def test_the_record_says_what_waits() -> None:
    subject = engine(seqs=1)
    subject.submit(submit("a"))
    subject.submit(submit("b", 7))
    output = subject.step()
    assert output is not None
    record = output.record
    assert (record.step, record.num_running, record.num_waiting, record.num_waiting_tokens) == (1, 1, 1, 7)
    assert (record.num_pages_used, record.num_pages) == (1, 32)


def test_a_step_reports_what_was_left_to_pytorchs_matmuls() -> None:
    fallbacks = MatmulFallbacks()
    scheduler = Scheduler(SchedulerLimits(64, 8, 32), PagePool(32, 4))
    options = EngineOptions(100, (EOS,), seed=0)

    def statistics() -> StepStatistics:
        return StepStatistics(matmul_fallbacks=fallbacks.take())

    subject = Engine(scheduler, FakeRunner(), options, clock=Clock(), take_statistics=statistics)
    fallbacks.note(MatmulFallback.LAUNCH_FAILED, "70 rows", "for a test")
    subject.submit(submit("a"))
    reported = [output.record.matmul_fallbacks for _ in range(2) if (output := subject.step()) is not None]
    assert reported == [{MatmulFallback.LAUNCH_FAILED: 1}, {}]
