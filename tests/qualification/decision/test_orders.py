"""Under `reproducible` one order serves all shapes in which a sequence can be computed, or nothing serves."""

from dataclasses import replace

import pytest

from kernels.vocabulary.path import KernelPath, Reject, Tier
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from qualification.decision.class_order import ClassOrder
from qualification.decision.decision import Book, Decision, Policy, Status, decide
from qualification.decision.orders import Known, choose_orders, unchecked_pairs
from qualification.evidence.anchors import class_of
from qualification.evidence.evidence import ORDER_SUITE, Evidence, Invariance
from qualification.evidence.matrix import Matrix
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

EXTEND = replace(DECODE, phase=Phase.EXTEND)
SHAPES = (SHAPE, EXTEND, DECODE)
PREFILL_ONLY = frozenset({Phase.PREFILL})


def ordered(name: str, order: str | None, **limits: object) -> KernelPath:
    return replace(path(name, **limits), order=order)


FAST, OLD, NEW = ordered("fast", None), ordered("old", "keys256"), ordered("new", "keys512")
SHORT = ordered("short", "keys128", phases=PREFILL_ONLY)  # the first of the catalog, and never enough
PATHS = (FAST, SHORT, OLD, NEW)


def seen(of: KernelPath, digest: str = "same bits", **changes: object) -> Invariance:
    assert of.order is not None
    return replace(Invariance(of.order, 100, 0, (("97 tokens", digest),)), **changes)


def proof(shape: AttentionShape, of: KernelPath, *, digest: str = "same bits", **changes: object) -> Evidence:
    """Proof with the check of the path's order, where it claims one; `changes` are of that check."""
    return evidence(shape, of, invariance=None if of.order is None else seen(of, digest, **changes))


def known(*proofs: Evidence, policy: Policy = Policy.REFUSE, own: tuple[Evidence, ...] = ()) -> Known:
    reviewed = Matrix({(entry.shape, entry.path): entry for entry in proofs}, "digest")
    return Known(PATHS, MACHINE, Book(reviewed, {(it.shape, it.path): it for it in own}), policy, frozenset())


def decided(of: Known, shapes: tuple[AttentionShape, ...] = SHAPES) -> tuple[ClassOrder, list[Decision]]:
    [order] = choose_orders(shapes, of).values()
    return order, [
        decide(
            shape, paths=of.paths, fingerprint=MACHINE, book=of.book, quarantined=of.quarantined,
            policy=of.policy, order=order,
        )
        for shape in shapes
    ]  # fmt: skip


ALL = (proof(SHAPE, SHORT), *(proof(shape, of) for shape in SHAPES for of in (FAST, OLD, NEW)))


def test_one_order_serves_every_phase() -> None:
    order, decisions = decided(known(*ALL))
    assert (order.order, order.wanted, order.problem) == ("keys256", "keys256", None)
    assert {(it.path, it.order, it.status, it.fallback_reasons) for it in decisions} == {
        ("old", "keys256", Status.PROVEN, ())
    }
    rejected = {it.path: it.rejections for it in decisions[0].candidates}
    assert {rejection.code for why in rejected.values() for rejection in why} == {Reject.BATCH_VARIANT}
    assert "no fixed order" in rejected["fast"][0].detail
    assert all(name in rejected["new"][0].detail for name in ("keys512", "keys256"))
    assert str(DECODE) in rejected["short"][0].detail  # what keys128 lacks


# What stands against `old` in decode, by name: evidence in place of its proof there; the code of its rejection.
AGAINST_OLD = {
    "not measured": (None, Reject.UNPROVEN),
    "not checked": (evidence(DECODE, OLD), Reject.BATCH_VARIANT),
    "checked for another order": (evidence(DECODE, OLD, invariance=seen(NEW)), Reject.BATCH_VARIANT),
    "checked by an older suite": (proof(DECODE, OLD, suite=ORDER_SUITE - 1), Reject.BATCH_VARIANT),
    "bits that change": (proof(DECODE, OLD, changed=3, where="9 sequences"), Reject.BATCH_VARIANT),
    "nothing compared": (proof(DECODE, OLD, compared=0), Reject.BATCH_VARIANT),
    "other bits than in prefill": (proof(DECODE, OLD, digest="other bits"), Reject.BATCH_VARIANT),
    "wrong numbers": (evidence(DECODE, OLD, checks=checks(2.0), invariance=seen(OLD)), Reject.FAILED),
}


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("name", AGAINST_OLD)
def test_an_order_that_lacks_one_shape_serves_none(name: str, policy: Policy) -> None:
    instead, code = AGAINST_OLD[name]
    proofs = [entry for entry in ALL if (entry.shape, entry.path) != (DECODE, "old")]
    order, decisions = decided(known(*proofs, *(() if instead is None else (instead,)), policy=policy))
    assert (order.order, order.wanted, order.is_served) == ("keys512", "keys256", True)
    assert {(it.path, it.order) for it in decisions} == {("new", "keys512")}
    # The order that was wanted is not served: that is a fallback, in every phase.
    assert {(it.wanted, it.fallback_reasons[-1]) for it in decisions} == {("old", Reject.BATCH_VARIANT)}
    assert str(DECODE) in order.lacking["keys256"]
    candidates = {it.path: [rejection.code for rejection in it.rejections] for it in decisions[2].candidates}
    assert Reject.BATCH_VARIANT in candidates["old"]
    alone = decide(
        DECODE, paths=(OLD,), fingerprint=MACHINE, book=known(*(() if instead is None else (instead,))).book,
        quarantined=frozenset(), policy=policy, order=ClassOrder("attention", "keys256", anchors=order_anchors()),
    )  # fmt: skip
    assert alone.path is None
    assert code in {rejection.code for rejection in alone.candidates[0].rejections}


def order_anchors() -> dict:
    """The bits of prefill, which the catalog's first path has."""
    [order] = choose_orders((SHAPE,), replace(known(proof(SHAPE, OLD)), paths=(OLD,))).values()
    return dict(order.anchors)


def test_without_the_setting_a_variant_path_serves() -> None:
    variant = proof(DECODE, OLD, changed=3)
    for order, path_name in ((None, "old"), (ClassOrder("attention", "keys256", "keys256"), None)):
        decision = decide(
            DECODE, paths=(OLD,), fingerprint=MACHINE, book=known(variant).book, quarantined=frozenset(),
            policy=Policy.REFUSE, order=order,
        )  # fmt: skip
        assert decision.path == path_name
    assert (decision.status, decision.fallback_reasons) == (Status.FAILED, (Reject.BATCH_VARIANT,))


def test_where_no_order_serves_one_line_names_the_shapes() -> None:
    proofs = [entry for entry in ALL if entry.shape is not DECODE]
    order, decisions = decided(known(*proofs))
    assert decisions[2].path is None
    assert order.problem is not None
    assert all(word in order.problem for word in ("attention", "keys256", "keys512", str(DECODE)))
    assert "\n" not in order.problem
    [without] = choose_orders(SHAPES, replace(known(*ALL), paths=(FAST,))).values()
    assert without.problem is not None
    assert "no path of attention" in without.problem


def test_only_paths_of_the_first_able_order_are_measured() -> None:
    pairs = [(shape, "old") for shape in SHAPES]
    assert [(shape, of.name) for shape, of in unchecked_pairs(SHAPES, known(policy=Policy.QUALIFY))] == pairs
    # A proof of review without the check of the order is measured again, a failure of it is not: the next order is.
    unchecked = known(*(evidence(shape, OLD) for shape in SHAPES), policy=Policy.QUALIFY)
    assert [(shape, of.name) for shape, of in unchecked_pairs(SHAPES, unchecked)] == pairs
    variant = known(*(proof(shape, OLD, changed=1) for shape in SHAPES), policy=Policy.QUALIFY)
    assert [of.name for _, of in unchecked_pairs(SHAPES, variant)] == ["new"] * 3
    assert unchecked_pairs(SHAPES, known(*ALL)) == []


def test_own_evidence_adds_the_check_to_a_reviewed_proof() -> None:
    reviewed, own = (evidence(SHAPE, OLD),), (proof(SHAPE, OLD),)
    for policy, found in ((Policy.QUALIFY, ("old", Status.PROVISIONAL)), (Policy.REFUSE, (None, Status.PROVISIONAL))):
        _, [decision] = decided(replace(known(*reviewed, policy=policy, own=own), paths=(OLD,)), (SHAPE,))
        assert (decision.path, decision.status) == found


def test_a_class_is_what_one_sequence_meets() -> None:
    names = {class_of(shape) for shape in (*SHAPES, replace(EXTEND, mask=Mask.SPANS), replace(DECODE, page_size=32))}
    assert len(names) == 1
    assert class_of(replace(DECODE, window=128)) not in names


def test_fallback_tier_still_comes_last_within_an_order() -> None:
    slow = replace(path("slow", Tier.FALLBACK), order="keys256")
    of = replace(known(*(proof(shape, it) for shape in SHAPES for it in (OLD, slow))), paths=(slow, OLD))
    _, decisions = decided(of)
    assert {(it.path, it.is_fallback) for it in decisions} == {("old", False)}
