"""An operator's orders add up until they are lifted."""

from dataclasses import replace

from kernels.catalog import PATHS
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Phase
from qualification.decision.decision import Decision, Pairs
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.operator_quarantine import OperatorQuarantine
from server.protocol.messages import ChangeQuarantine
from support.engine.attested import Subject


def test_an_order_leaves_the_earlier_ones_in_force(subject: Subject) -> None:
    def redecide(shape: AttentionShape, broken: Pairs, overridden: Pairs) -> Decision[AttentionShape]:
        is_out = ("sdpa.cpu", str(shape)) in broken | overridden
        return replace(subject.decisions[shape], path="sdpa.math" if is_out else "sdpa.cpu")

    dispatcher = Dispatcher(subject.decisions, PATHS, subject.built.runner.dispatcher.flags, redecide=redecide)
    orders = OperatorQuarantine(dispatcher, {})
    pairs = {
        phase: [("sdpa.cpu", str(shape)) for shape in subject.decisions if shape.phase is phase]
        for phase in PLANNED_PHASES
    }

    def serving() -> dict[str, str]:
        return {choice.decision.shape.phase.value: choice.use.path for choice in dispatcher.choices}

    first = orders.change(ChangeQuarantine(1, pairs[Phase.DECODE]))
    assert (first.stranded, first.quarantined) == ([], sorted(pairs[Phase.DECODE]))
    second = orders.change(ChangeQuarantine(2, pairs[Phase.PREFILL]))
    assert second.quarantined == sorted(pairs[Phase.DECODE] + pairs[Phase.PREFILL])
    assert serving() == {"prefill": "sdpa.math", "extend": "sdpa.cpu", "decode": "sdpa.math"}
    third = orders.change(ChangeQuarantine(3, pairs[Phase.EXTEND], pairs[Phase.DECODE]))
    assert third.quarantined == sorted(pairs[Phase.PREFILL] + pairs[Phase.EXTEND])
    assert serving() == {"prefill": "sdpa.math", "extend": "sdpa.math", "decode": "sdpa.cpu"}
    last = orders.change(ChangeQuarantine(4, [], third.quarantined))
    assert (last.quarantined, set(serving().values())) == ([], {"sdpa.cpu"})
