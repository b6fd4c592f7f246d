"""Graphs of steps without a GPU: a fake capture runs the step, and its replay runs it again on the same memory."""

from dataclasses import replace
from statistics import median

import pytest
import torch

from kernels.catalog import any_path_named
from kernels.linear.paths import LinearPath
from kernels.linear.shape import LinearShape
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.decision import Decision, Pairs
from qualification.decision.linear_shapes import linear_shapes_needed
from server.engine.execution.graphs import StepGraphs
from server.engine.operators.attention_table import Choice
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.linear import LinearTable
from server.engine.operators.table import OperatorTable
from server.engine.proof.shadow_check import ShadowCheck
from server.model.decoder import Decoder, Operators
from support.engine.closure_graphs import EAGER, PATH, capture, decide
from support.engine.graph_session import attention_counts
from support.engine.graph_subject import MAX_LEN, Subject
from support.models.tiny_llama import NAN_TOKEN, NUM_LAYERS, NUM_TOKENS, TinyLlama


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_greedy_tokens_from_graphs_equal_those_of_transformers(
    decoder: Decoder, tiny_llama: TinyLlama, runs_ahead: bool
) -> None:
    subject = Subject(decoder, runs_ahead=runs_ahead)
    session = subject.session.submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    assert subject.graphs.num_replays > NUM_TOKENS // 2


class Counting(ShadowCheck):
    """A check of every step, with what was charged to its budget since the last look."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True)
        self.charged: list[float] = []

    def spend(self, seconds: float) -> None:
        super().spend(seconds)
        self.charged.append(seconds)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_checked_step_is_launched_by_kernels_and_paid_for(
    decoder: Decoder, tiny_llama: TinyLlama, runs_ahead: bool
) -> None:
    subject = Subject(decoder, runs_ahead=runs_ahead)
    check = subject.runner.shadow = Counting(subject.dispatcher)
    session = subject.session.submit_all(tiny_llama.prompts)
    results, taps_s, steps_s = [], [], []
    while session.engine.has_work:
        num_replays = subject.graphs.num_replays
        session.step()
        report = check.judge()
        if report is not None and not runs_ahead:
            results.append(report.result)
            assert subject.graphs.num_replays == num_replays
            if len(check.charged) == 3:  # this step would have been a graph
                tap_s, step_s, _ = check.charged
                taps_s.append(tap_s)
                steps_s.append(step_s)
        check.charged.clear()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    if not runs_ahead:
        assert set(results) == {"match"}
        assert len(taps_s) > NUM_TOKENS // 2
        assert median(taps_s) < median(steps_s)
    subject.runner.shadow = None
    before = subject.graphs.num_replays
    session.submit("again", tiny_llama.prompts[0])
    session.drain()
    assert subject.graphs.num_replays > before


def test_padding_rows_write_to_their_own_page_only(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    for index in range(3):  # 3 rows are padded to 4
        subject.session.submit(f"r{index}", tiny_llama.prompts[index])
    subject.session.drain()
    assert subject.graphs.num_replays
    for pages in subject.kv.tensors:
        is_written = ~pages.isnan().flatten(2).any(2)  # [pages, slots]
        num_tokens = sum(len(prompt) + NUM_TOKENS - 1 for prompt in tiny_llama.prompts[:3])
        # Captures ran with every row padded: they wrote nobody's page alone too.
        assert int(is_written[:-1].sum()) == num_tokens
        assert bool(is_written[-1].any())


def test_attention_launches_are_layers_times_steps_with_replays(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    subject.session.submit("a", tiny_llama.prompts[3])
    launches = subject.session.drain().launches()
    assert subject.graphs.num_replays == NUM_TOKENS
    assert launches == {
        ("prefill", PATH.name): NUM_LAYERS,
        ("decode", PATH.name): (NUM_TOKENS - 1) * NUM_LAYERS,
    }
    counts = attention_counts(*subject.session.outputs)
    assert {(count.num_sequences, count.num_tokens) for count in counts if count.phase == "decode"} == {(1, 1)}
    assert [(count.num_sequences, count.num_tokens) for count in counts if count.phase == "prefill"] == [(1, 33)]


def test_a_prompt_among_decode_rows_is_replayed_with_them(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    session = subject.session
    session.submit("r0", tiny_llama.prompts[4])
    session.step()
    for row in (1, 2, 3):  # three prompts beside one decode row, then beside four
        session.submit(f"r{row}", tiny_llama.prompts[row])
    session.step()
    counts = {count.phase: count for count in attention_counts(session.outputs[-1])}
    assert (counts["prefill"].num_sequences, counts["prefill"].num_tokens) == (3, 51)
    assert (counts["decode"].num_sequences, counts["decode"].num_tokens) == (1, 1)
    assert {count.num_launches for count in counts.values()} == {NUM_LAYERS}
    session.submit("r4", tiny_llama.prompts[3])
    session.drain()
    assert session.all_tokens(5) == [tiny_llama.greedy[index] for index in (4, 1, 2, 3, 3)]
    assert subject.graphs.num_replays == len(session.outputs)  # nothing was launched kernel by kernel


def test_graphs_of_a_changed_decision_rest_and_eager_serves(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    before = subject.graphs.keys
    [short] = [choice for choice in decode_choices(subject) if choice.decision.shape.context_bucket.lo == 0]
    subject.dispatcher.replace(short, torch.OutOfMemoryError("no memory"))
    session = subject.session.submit_all(tiny_llama.prompts[3:4]).drain()
    assert session.all_tokens(1) == tiny_llama.greedy[3:4]
    assert subject.graphs.num_replays == 1  # the prompt
    resting = set(before) - set(subject.graphs.keys)
    assert {key.decode.longest for key in resting if key.decode} == {short.decision.shape.context_bucket}
    assert all(key.decode and not key.prompts for key in resting)
    assert 0 < len(resting) < len(before)
    assert session.launches()["decode", EAGER.name] == (NUM_TOKENS - 1) * NUM_LAYERS
    assert ("decode", PATH.name) not in session.launches()


def test_graphs_of_a_quarantined_product_rest_and_eager_serves(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    right = any_path_named("torch.linear")
    assert isinstance(right, LinearPath)
    path = replace(right, name="gluon.linear.graphable")
    shapes = linear_shapes_needed(decoder.config, Dtype.FP32, 64, "cpu")

    def again(shape: LinearShape, *_: Pairs) -> Decision:
        return replace(decide(shape, right.name), fallback_reasons=(Reject.QUARANTINED,))

    decisions = {shape: decide(shape, path.name) for shape in shapes}
    table = LinearTable(decisions, (right, path), redecide=again)
    own = Decoder(decoder.config, decoder.weights, operators=Operators(table.product))
    subject = Subject(own, tables=(table,))
    assert subject.graphs.keys
    subject.dispatcher.quarantine(path.name, Operator.LINEAR)
    session = subject.session.submit_all(tiny_llama.prompts[3:4]).drain()
    assert session.all_tokens(1) == tiny_llama.greedy[3:4]
    assert (subject.graphs.num_replays, subject.graphs.keys) == (0, ())
    counts = [count for output in session.outputs for count in output.record.dispatches]
    launches = sum(count.num_launches for count in counts if (count.phase, count.path) == ("linear", right.name))
    assert launches == len(session.outputs) * table.num_launches


class Waiting(ExpertsTable):
    """Experts that no graph can hold."""

    def __init__(self) -> None:
        OperatorTable.__init__(self, Operator.EXPERTS, {}, ())

    @property
    def is_capturable(self) -> bool:
        return False


def test_experts_that_wait_for_the_device_are_not_captured(decoder: Decoder) -> None:
    """Such experts serve when no kernel of a mixture could be launched in the run before the capture."""
    subject = Subject(decoder)
    subject.dispatcher.tables = (Waiting(),)
    subject.graphs = StepGraphs(subject.runner.worker, subject.sizes, max_context=MAX_LEN)
    subject.graphs.capture(capture, lambda _: None)
    assert subject.graphs.keys == ()


def test_graphs_are_replayed_again_when_an_order_is_lifted(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    before = subject.graphs.keys
    pairs = frozenset((PATH.name, str(shape)) for shape in subject.dispatcher.decisions)
    assert subject.dispatcher.override(pairs) == []
    subject.session.submit_all(tiny_llama.prompts[3:4]).drain()
    assert (subject.graphs.num_replays, subject.graphs.keys) == (0, ())
    assert subject.dispatcher.override(frozenset()) == []
    session = subject.session.submit_all(tiny_llama.prompts[3:4]).drain()
    assert session.all_tokens(1) == [tiny_llama.greedy[3] * 2]
    assert subject.graphs.num_replays > 0
    assert subject.graphs.keys == before


@pytest.mark.parametrize("has_path", [False, True])
def test_a_bound_without_its_path_serves_no_shorter_rows(
    decoder: Decoder, tiny_llama: TinyLlama, has_path: bool
) -> None:
    """The long bucket is left without a path, or the short one has another path than the graphs."""
    subject = Subject(decoder)
    [bound] = [it for it in decode_choices(subject) if bool(it.decision.shape.context_bucket.lo) != has_path]
    other = subject.dispatcher.replace(bound, torch.OutOfMemoryError("no memory"))
    if not has_path:
        with pytest.raises(NoPathError):
            subject.dispatcher.replace(other, torch.OutOfMemoryError("no memory"))
    session = subject.session
    session.submit("r0", tiny_llama.prompts[4])
    session.step()
    session.submit("r1", tiny_llama.prompts[1])
    session.step()  # both kinds of rows: a graph would be bounded by the bucket
    assert subject.graphs.num_replays == 1  # of the prompt alone
    if has_path:
        assert session.launches()["decode", EAGER.name] == NUM_LAYERS
    assert session.drain().all_tokens(2) == [tiny_llama.greedy[4], tiny_llama.greedy[1]]
    assert has_path or subject.graphs.num_replays > NUM_TOKENS // 2


def decode_choices(subject: Subject) -> list[Choice]:
    return [choice for choice in subject.dispatcher.choices if choice.decision.shape.phase is Phase.DECODE]


def test_a_path_that_no_graph_can_hold_is_not_captured(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder, path=EAGER.name, runs_ahead=True)  # tokens are read where the device chose them
    assert subject.graphs.keys == ()
    session = subject.session.submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy


def test_logits_without_a_finite_number_end_their_own_row(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    subject = Subject(decoder)
    [well] = tiny_llama.prompts[2:3]
    subject.session.submit("well", well)
    subject.session.submit("sick", well, logit_bias=((NAN_TOKEN, 1e9),))  # generates it first: the next step is a graph
    session = subject.session.drain()
    assert session.total("num_nonfinite") == 1
    assert session.tokens("well") == tiny_llama.greedy[2]
