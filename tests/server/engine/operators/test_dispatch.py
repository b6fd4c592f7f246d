import ast
import timeit
from array import array
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.linear.library.cublaslt import CublasLtError
from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import KernelPath, Limits, Reject, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from qualification.decision.decision import Decision, Pairs, Status
from server.engine.operators.decisions import NoPathError, Redecide
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.dispatch_key import Heads, bucket_index
from server.engine.operators.launch_errors import is_device_lost, launch_failure
from server.engine.operators.step_attention import StepAttention
from server.engine.scheduling.sequence import Batch, Sequence
from server.model.kv_cache import KVLayer
from server.protocol.messages import SamplingParams
from support.engine.graph_session import Inputs

WINDOW = 64
LIMITS = Limits(frozenset({Device.CPU}), frozenset(PLANNED_PHASES), frozenset(Dtype), max_head_dim=64)


def path(name: str, value: float, error: Exception | None = None, *, num_good: int = 0) -> KernelPath:
    """Fills `out` with `value`; with an `error`, only `num_good` times."""
    calls = iter(range(1000))

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, _: AttentionFlags, out: Tensor) -> None:
        if error is not None and next(calls) >= num_good:
            raise error
        assert k.shape == v.shape
        assert k.shape[0] == (q.shape[0] if not batch.is_paged else 3)
        out.fill_(value)

    return KernelPath(name, Tier.FIRST, LIMITS, "digest", (), run)


def shape(phase: Phase, window: int | None = None) -> AttentionShape:
    return AttentionShape(phase, Dtype.FP32, Dtype.FP32, 2, 1, 4, Bucket.LE_128, Bucket.LE_128, window=window)


def decision(subject: AttentionShape, name: str | None, *reasons: Reject) -> Decision:
    return Decision(subject, name, Status.PROVEN, "first", reasons, (), None)


def decisions(**names: str) -> dict[AttentionShape, Decision]:
    """Phase -> path, for layers with and without a window."""
    shapes = [shape(phase, window) for phase in PLANNED_PHASES for window in (None, WINDOW)]
    return {each: decision(each, names.get(each.phase.value, "first")) for each in shapes}


def nobody(subject: AttentionShape, _: Pairs, __: Pairs) -> Decision:
    return decision(subject, None)


def dispatcher(
    plan: Mapping[AttentionShape, Decision],
    *paths: KernelPath,
    redecide: Redecide = nobody,
) -> Dispatcher:
    """Three layers, the middle one with a window."""
    plain = AttentionFlags(scale=0.5)
    return Dispatcher(plan, paths, (plain, replace(plain, window=WINDOW), plain), redecide=redecide)


def step(subject: Dispatcher) -> tuple[StepAttention, list[list[float]]]:
    """Attention of three layers over a prompt of 2, a chunk of 2 over 1 and one decode token; each token's output."""
    sequences = [Sequence(str(n), [0] * n, n, SamplingParams(max_tokens=1), 0, 0.0) for n in (2, 3, 4)]
    tables = (array("i", [0]), array("i", [1]), array("i", [2]))
    batch = Batch(tuple(sequences), (2, 2, 1), (2, 3, 4), tables, (0, 1, 2), num_prefill=1, num_extend=1)
    layers = tuple(KVLayer(torch.zeros(3, 4, 1, 4), torch.zeros(3, 4, 1, 4)) for _ in range(3))
    attention = StepAttention(subject, Inputs().load(batch).parts, layers)
    attention.plan()
    outputs = []
    for layer in range(3):
        out = torch.full((5, 2, 4), torch.nan)
        attention(layer, torch.zeros(5, 2, 4), torch.zeros(5, 1, 4), torch.zeros(5, 1, 4), out)
        outputs.append(out[:, 0, 0].tolist())
    return attention, outputs


def test_layers_of_one_step_share_a_plan_and_steps_do_not() -> None:
    made: list[tuple[Phase, str]] = []

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:  # noqa: ARG001
        phase = Phase.PREFILL if not batch.is_paged else Phase.DECODE if batch.max_seqlen_q == 1 else Phase.EXTEND
        name = batch.once(flags.window, lambda: f"plan {len(made)}")
        made.append((phase, name))

    subject = dispatcher(decisions(), replace(path("first", 1.0), run=run))
    of_steps = []
    for _ in range(2):
        made.clear()
        step(subject)
        of_steps.append([name for phase, name in made if phase is Phase.EXTEND])
    assert of_steps == [["plan 1", "plan 4", "plan 1"]] * 2, "each step plans anew, once for each window"


def test_a_watched_call_plans_for_itself() -> None:
    plans = []

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:  # noqa: ARG001
        plans.append(batch.plans)

    subject = dispatcher(decisions(), replace(path("first", 1.0), run=run))
    with subject.watched(lambda _: nullcontext()):
        step(subject)
    assert plans == [None] * 9


def test_every_launch_is_counted_by_path() -> None:
    plan = {each: decision(each, "windowed" if each.window else "full", Reject.DTYPE) for each in decisions()}
    attention, _ = step(dispatcher(plan, path("windowed", 1.0), path("full", 2.0)))
    counts = {(c.phase, c.path): (c.num_launches, c.num_tokens, c.bucket) for c in attention.counts()}
    tokens = {"prefill": 2, "extend": 2, "decode": 1}
    assert counts == {
        (phase, name): (launches, tokens[phase], "le_128")
        for phase in tokens
        for name, launches in (("full", 2), ("windowed", 1))
    }
    assert attention.counts()[0].fallback_reasons == ["dtype"]


def test_layers_with_other_heads_have_their_own_paths() -> None:
    plan = {each: decision(each, "narrow") for each in decisions()}
    wide = {replace(each, num_kv_heads=2, head_dim=8): decision(each, "wide") for each in decisions()}
    plan |= {each: replace(found, shape=each) for each, found in wide.items()}
    flags, heads = AttentionFlags(scale=0.5), (Heads(2, 1, 4), Heads(2, 2, 8), Heads(2, 1, 4))
    subject = Dispatcher(plan, [path("narrow", 1.0), path("wide", 2.0)], (flags,) * 3, redecide=nobody, heads=heads)
    attention, outputs = step(subject)
    assert outputs == [[1.0] * 5, [2.0] * 5, [1.0] * 5]
    assert {(it.path, it.num_launches) for it in attention.counts()} == {("narrow", 2), ("wide", 1)}
    with pytest.raises(ValueError, match="name those of each"):
        Dispatcher(plan, (), (flags,) * 3, redecide=nobody)


def test_a_path_that_cannot_launch_makes_room_for_the_next() -> None:
    error = OutOfResources(300_000, 232_448, "shared memory")
    asked = []

    def redecide(subject: AttentionShape, quarantined: Pairs, _: Pairs) -> Decision:
        asked.append(quarantined)
        return decision(subject, "second", Reject.QUARANTINED)

    subject = dispatcher(decisions(), path("first", 1.0, error), path("second", 2.0), redecide=redecide)
    attention, outputs = step(subject)
    assert outputs == [[2.0] * 5] * 3
    assert {(c.path, c.num_launches) for c in attention.counts()} == {("second", 2), ("second", 1)}
    broken = subject.take_quarantined()
    assert sorted(broken) == sorted(("first", str(each)) for each in decisions())
    assert asked[-1] == frozenset(broken)
    step(subject)
    assert subject.take_quarantined() == []
    assert len(asked) == len(broken)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "out_of_resources"),
        (torch.OutOfMemoryError("no memory"), "out_of_resources"),
        (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), "out_of_resources"),
        (RuntimeError("Triton Error [CUDA]: ... due to cluster misconfiguration"), "out_of_resources"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_resources"),
        (PTXASError("ptxas died"), "compile_error"),
        (CompilationError("def kernel(): pass", ast.parse("1").body[0]), "compile_error"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "compile_error"),
        (RuntimeError("No available kernel. Aborting execution."), "disabled"),
        (CublasLtError("cublasLtMatmul returned 14"), "disabled"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), None),
        (ValueError("No available kernel"), None),
    ],
)
def test_a_launch_failure_has_its_reason_code(error: Exception, code: str | None) -> None:
    found = launch_failure(error)
    assert (found and found.value) == code


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("Triton Error [CUDA]: a kernel launch error has occurred due to cluster misconfiguration", False),
        ("Triton Error [CUDA]: out of memory", False),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
    ],
)
def test_a_launch_without_room_does_not_lose_the_device(message: str, is_lost: bool) -> None:
    assert is_device_lost(RuntimeError(message)) is is_lost


def test_layers_that_ran_before_a_failure_stay_counted() -> None:
    first = path("first", 1.0, torch.OutOfMemoryError("no memory"), num_good=1)
    plan = decisions(extend="second", decode="second")
    subject = dispatcher(plan, first, path("second", 2.0), redecide=lambda each, *_: decision(each, "second"))
    attention, outputs = step(subject)
    assert [out[0] for out in outputs] == [1.0, 2.0, 2.0]
    prefill = [(c.path, c.num_launches) for c in attention.counts() if c.phase == "prefill"]
    assert sorted(prefill) == [("first", 1), ("second", 1), ("second", 1)]


def by_order(subject: AttentionShape, _: Pairs, taken_out: Pairs) -> Decision:
    """`second` where `first` is taken out, nothing where `second` is too."""
    if ("first", str(subject)) not in taken_out:
        return decision(subject, "first")
    name = None if ("second", str(subject)) in taken_out else "second"
    return decision(subject, name, Reject.OPERATOR_OVERRIDE)


def test_a_fault_is_planted_where_the_path_serves() -> None:
    subject = dispatcher(decisions(decode="other"), path("first", 1.0), path("other", 2.0))
    subject.substitute(path("first", 3.0))
    assert step(subject)[1] == [[3.0, 3.0, 3.0, 3.0, 2.0]] * 3


def pairs_of(*names: str, phase: Phase) -> Pairs:
    return frozenset((name, str(each)) for name in names for each in decisions() if each.phase is phase)


def test_an_order_changes_the_path_until_it_is_lifted() -> None:
    subject = dispatcher(decisions(), path("first", 1.0), path("second", 2.0), redecide=by_order)
    assert subject.override(pairs_of("first", phase=Phase.EXTEND)) == []
    attention, outputs = step(subject)
    assert outputs == [[1.0, 1.0, 2.0, 2.0, 1.0]] * 3
    assert {tuple(c.fallback_reasons) for c in attention.counts() if c.path == "second"} == {("operator_override",)}
    assert subject.take_quarantined() == []  # it is no failure, and not kept like one
    assert subject.override(frozenset()) == []
    assert step(subject)[1] == [[1.0] * 5] * 3
    assert subject.plan == decisions_of(subject)


def decisions_of(subject: Dispatcher) -> dict[AttentionShape, Decision]:
    return {choice.decision.shape: choice.decision for choice in subject.choices}


def test_an_order_that_leaves_no_path_changes_nothing() -> None:
    subject = dispatcher(decisions(), path("first", 1.0), path("second", 2.0), redecide=by_order)
    stranded = subject.override(pairs_of("first", "second", phase=Phase.DECODE))
    assert set(stranded) == {each for each in decisions() if each.phase is Phase.DECODE}
    assert subject.overridden == frozenset()
    assert step(subject)[1] == [[1.0] * 5] * 3


def test_the_plan_shows_a_shape_that_nothing_serves_any_more() -> None:
    subject = dispatcher(decisions(), path("first", 1.0), redecide=nobody)
    subject.quarantine("first", Phase.DECODE)
    assert {each.phase for each, made in subject.plan.items() if made.path is None} == {Phase.DECODE}


def test_without_a_path_left_the_phase_is_named() -> None:
    plan = decisions(extend="broken")
    subject = dispatcher(plan, path("first", 1.0), path("broken", 2.0, torch.OutOfMemoryError("no memory")))
    with pytest.raises(NoPathError) as caught:
        step(subject)
    assert caught.value.phase is Phase.EXTEND


def test_an_unplanned_shape_is_no_silent_fallback() -> None:
    plan = {each: found for each, found in decisions().items() if each.phase is not Phase.DECODE}
    with pytest.raises(NoPathError, match="decode"):
        step(dispatcher(plan, path("first", 1.0)))


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: an illegal memory access"), RuntimeError("Triton Error [CUDA]: bad")]
)
def test_a_lost_device_ends_the_dispatcher(error: Exception) -> None:
    subject = dispatcher(decisions(), path("first", 1.0, error), path("second", 2.0))
    with pytest.raises(type(error)):
        step(subject)
    assert subject.take_quarantined() == []


def test_the_suspects_are_all_paths_of_the_step() -> None:
    attention, _ = step(dispatcher(decisions(), path("first", 1.0)))
    assert sorted(attention.suspects()) == sorted(("first", str(each)) for each in decisions())


def test_a_shape_of_another_mask_serves_no_causal_step() -> None:
    causal = decisions()
    spans = {replace(it, mask=Mask.SPANS): decision(replace(it, mask=Mask.SPANS), "second") for it in causal}
    for plan in (causal | spans, spans | causal):
        subject = dispatcher(plan, path("first", 1.0), path("second", 2.0))
        assert step(subject)[1] == [[1.0] * 5] * 3
        assert subject.decisions == plan


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 512, 513, 2048, 8193, 32768, 131072, 131073, 10**6])
def test_a_length_is_counted_into_the_bucket_that_holds_it(tokens: int) -> None:
    assert list(Bucket)[bucket_index(tokens)] is bucket_of(tokens)


def test_a_decision_is_a_dictionary_hit() -> None:
    subject = dispatcher(decisions(), path("first", 1.0))
    batch = AttentionBatch(torch.zeros(2, dtype=torch.int32), 1, 100)
    part = PhasePart(Phase.DECODE, slice(0, 1), batch, 1, 1)
    hits = {(None, 0, length): part for length in range(10)}

    def seconds(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=1000, repeat=20))

    one_hit_s = seconds(lambda: hits[None, 0, batch.max_seqlen_q])
    assert (
        seconds(lambda: subject.choice(part, subject.kinds[0])) < 15 * one_hit_s
    )  # 4 times on a Xeon; deciding anew takes 1,000
