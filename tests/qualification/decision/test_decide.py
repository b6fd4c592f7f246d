from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.collective.paths import COLLECTIVE_PATHS, without_peer_memory
from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import AnyPath, KernelPath, Reject, Rejection, Tier
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.decision import Book, Decision, Policy, Status, decide
from qualification.evidence.evidence import SUITE, Evidence, Timing
from qualification.evidence.matrix import Matrix
from qualification.measure.start_plan import missing_pairs
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

FIRST, OTHER, FALLBACK = path("first"), path("other"), path("fallback", Tier.FALLBACK)
NONE: frozenset[tuple[str, str]] = frozenset()


def book(reviewed: tuple[Evidence, ...] = (), own: tuple[Evidence, ...] = (), problems: tuple[str, ...] = ()) -> Book:
    refused = tuple(Rejection(Reject.MATRIX_INVALID, problem) for problem in problems)
    return Book(
        Matrix({(entry.shape, entry.path): entry for entry in reviewed}, "digest", refused),
        {(entry.shape, entry.path): entry for entry in own},
    )


def choose(
    paths: tuple[KernelPath, ...],
    known: Book,
    policy: Policy = Policy.REFUSE,
    quarantined: frozenset[tuple[str, str]] = NONE,
) -> Decision:
    return decide(SHAPE, paths=paths, fingerprint=MACHINE, book=known, quarantined=quarantined, policy=policy)


SMALL, DECODER = path("small", max_head_dim=32), path("decoder", phases=frozenset({Phase.DECODE}))
FOREIGN = path("foreign", devices=frozenset({Device.CUDA}))
BROKEN = frozenset({("first", str(SHAPE))})
WRONG, OLDER, NEWER = (
    {"checks": checks(2.0)},
    {"source_digest": "older"},
    {"fingerprint": replace(MACHINE, torch="2.12.0")},
)
PROVEN, PROVISIONAL, STALE, UNPROVEN = Status.PROVEN, Status.PROVISIONAL, Status.STALE, Status.UNPROVEN
REFUSE, QUALIFY, DEGRADE = Policy


def proof(kernel: KernelPath, p50_us: float = 10.0, **changes: object) -> Evidence:
    return evidence(SHAPE, kernel, p50_us, **changes)


Setting = tuple[tuple[KernelPath, ...], Book, tuple[Policy, ...], frozenset[tuple[str, str]]]


def setting(
    paths: tuple[KernelPath, ...],
    *reviewed: Evidence,
    own: tuple[Evidence, ...] = (),
    under: tuple[Policy, ...] = tuple(Policy),
    broken: frozenset[tuple[str, str]] = NONE,
) -> Setting:
    return paths, book(reviewed, own), under, broken


OTHERS = frozenset({("first", str(DECODE))})
OTHER_BROKEN, RIVAL_BROKEN = frozenset({("other", str(SHAPE))}), frozenset({("rival", str(SHAPE))})
RIVAL = replace(path("rival", Tier.FALLBACK), competes_on=frozenset({Device.CPU}))
# What it shows: what is given; the path that serves, the wanted one, the status, and the reason of a fallback.
RULES = {
    "tier, then speed": (
        setting((FALLBACK, FIRST), proof(FIRST, 99.0), proof(FALLBACK)), "first", "first", PROVEN, None),
    "speed in a tier": (setting((FIRST, OTHER), proof(FIRST, 99.0), proof(OTHER)), "other", "other", PROVEN, None),
    "equal times": (setting((FIRST, OTHER), proof(OTHER), proof(FIRST)), "first", "first", PROVEN, None),
    "equal, turned": (setting((OTHER, FIRST), proof(FIRST), proof(OTHER)), "other", "other", PROVEN, None),
    "wrong": (setting((FIRST, OTHER), proof(FIRST, **WRONG), proof(OTHER)), "other", "first", PROVEN, Reject.FAILED),
    "unable": (setting((SMALL, FALLBACK), proof(FALLBACK)), "fallback", "small", PROVEN, Reject.HEAD_DIM),
    "unable in its tier": (setting((SMALL, FIRST, FALLBACK), proof(FIRST)), "first", "first", PROVEN, None),
    "foreign": (setting((FOREIGN, FIRST), proof(FIRST)), "first", "first", PROVEN, None),
    "foreign alone": (setting((FOREIGN, FALLBACK), proof(FALLBACK)), "fallback", "foreign", PROVEN, Reject.ARCH),
    "foreign first": (
        setting((FOREIGN, SMALL, FALLBACK), proof(FALLBACK)), "fallback", "small", PROVEN, Reject.HEAD_DIM),
    "other phase": (setting((DECODER, FIRST), proof(FIRST)), "first", "first", PROVEN, None),
    "phase first": (setting((DECODER, SMALL, FALLBACK), proof(FALLBACK)), "fallback", "small", PROVEN, Reject.HEAD_DIM),
    "own": (setting((FIRST,), own=(proof(FIRST),), under=(QUALIFY,)), "first", "first", PROVISIONAL, None),
    "own refused": (
        setting((FIRST,), own=(proof(FIRST),), under=(REFUSE,)), None, "first", PROVISIONAL, Reject.UNPROVEN),
    "none": (setting((FIRST,), under=(REFUSE, QUALIFY)), None, "first", UNPROVEN, Reject.UNPROVEN),
    "none degraded": (setting((FIRST,), under=(DEGRADE,)), "first", "first", UNPROVEN, Reject.UNPROVEN),
    "proven fallback": (
        setting((FIRST, FALLBACK), proof(FALLBACK), under=(DEGRADE,)), "fallback", "first", PROVEN, Reject.UNPROVEN),
    "stale, then unproven": (
        setting((FIRST, OTHER), proof(OTHER, **NEWER), under=(DEGRADE,)), "other", "first", STALE, Reject.UNPROVEN),
    "stale": (setting((FIRST,), proof(FIRST, **OLDER), under=(REFUSE, QUALIFY)), None, "first", STALE, Reject.STALE),
    "stale degraded": (
        setting((FIRST,), proof(FIRST, **OLDER), under=(DEGRADE,)), "first", "first", STALE, Reject.STALE),
    "own, then a fallback": (
        setting((FALLBACK, FIRST), proof(FALLBACK), own=(proof(FIRST, 99.0),), under=(DEGRADE,)),
        "first", "first", PROVISIONAL, None),
    "stale times": (
        setting((FIRST, OTHER), proof(FIRST, 99.0, **OLDER), proof(OTHER, **OLDER), under=(DEGRADE,)),
        "first", "first", STALE, Reject.STALE),
    "best of the able": (
        setting((SMALL, FIRST, OTHER), proof(SMALL), proof(FIRST, **OLDER), under=(REFUSE,)),
        None, "first", STALE, Reject.STALE),
    "wrong alone": (setting((FIRST,), proof(FIRST, **WRONG)), None, "first", Status.FAILED, Reject.FAILED),
    "broken": (setting((FIRST,), proof(FIRST), broken=BROKEN), None, "first", Status.QUARANTINED, Reject.QUARANTINED),
    "broken elsewhere": (setting((FIRST,), proof(FIRST), broken=OTHERS), "first", "first", PROVEN, None),
    "wrong here": (
        setting((FIRST,), proof(FIRST), own=(proof(FIRST, **WRONG),)), None, "first", Status.FAILED, Reject.FAILED),
    "reviewed, then own": (setting((FIRST,), proof(FIRST), own=(proof(FIRST, 1.0),)), "first", "first", PROVEN, None),
    "the fastest broke": (
        setting((FIRST, OTHER), proof(FIRST, 99.0), proof(OTHER, 1.0), broken=OTHER_BROKEN),
        "first", "other", PROVEN, Reject.QUARANTINED),
    "what would not have served broke": (
        setting((FIRST, OTHER), proof(FIRST, 1.0), proof(OTHER, 99.0), broken=OTHER_BROKEN),
        "first", "first", PROVEN, None),
    "a stale one broke": (
        setting((FIRST, OTHER), proof(FIRST, 99.0), proof(OTHER, 1.0, **OLDER), broken=OTHER_BROKEN),
        "first", "first", PROVEN, None),
    "a competitor broke where no first tier is able": (
        setting((SMALL, RIVAL, FALLBACK), proof(RIVAL, 1.0), proof(FALLBACK, 50.0), broken=RIVAL_BROKEN),
        "fallback", "small", PROVEN, Reject.HEAD_DIM),
    "competitor alone": (setting((SMALL, RIVAL), proof(RIVAL)), "rival", "small", PROVEN, Reject.HEAD_DIM),
    "competitor for a wrong first tier": (
        setting((FIRST, RIVAL), proof(RIVAL, 1.0), proof(FIRST, **WRONG)), "rival", "first", PROVEN, Reject.FAILED),
    "competitor for a broken first tier": (
        setting((FIRST, RIVAL), proof(RIVAL, 1.0), proof(FIRST), broken=BROKEN),
        "rival", "first", PROVEN, Reject.QUARANTINED),
    "a faster competitor broke": (
        setting((FIRST, RIVAL), proof(FIRST, 50.0), proof(RIVAL), broken=RIVAL_BROKEN),
        "first", "rival", PROVEN, Reject.QUARANTINED),
    "a competitor that is not clearly faster broke": (
        setting((FIRST, RIVAL), proof(FIRST, 11.0), proof(RIVAL), broken=RIVAL_BROKEN), "first", "first", PROVEN, None),
    "own for a stale review": (
        setting((FIRST,), proof(FIRST, **OLDER), own=(proof(FIRST),), under=(QUALIFY,)),
        "first", "first", PROVISIONAL, None),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_choose_path_wanted_path_status_and_reason(rule: str) -> None:
    (paths, known, policies, broken), *expected, reason = RULES[rule]
    for policy in policies:
        decision = choose(paths, known, policy, broken)
        assert [decision.path, decision.wanted, decision.status] == expected
        assert decision.fallback_reasons == (() if reason is None else (reason,))
        assert decision.matrix_digest == ("digest" if decision.status is PROVEN else None)


def test_operators_order_is_a_reason_and_a_break_outweighs_it() -> None:
    known = book((evidence(SHAPE, FIRST), evidence(SHAPE, OTHER)))
    for broken, reason in ((NONE, Reject.OPERATOR_OVERRIDE), (BROKEN, Reject.QUARANTINED)):
        decision = decide(
            SHAPE, paths=(FIRST, OTHER), fingerprint=MACHINE, book=known, quarantined=broken, policy=REFUSE,
            overridden=BROKEN,
        )  # fmt: skip
        assert (decision.path, decision.wanted, decision.fallback_reasons) == ("other", "first", (reason,))


def rejections(decision: Decision, name: str) -> list[Reject]:
    found = [candidate for candidate in decision.candidates if candidate.path == name]
    return [rejection.code for rejection in found[0].rejections]


def test_fallback_has_every_reason_against_the_first_path() -> None:
    narrow = path("narrow", max_head_dim=32, dtypes=frozenset({Dtype.BF16}))
    reasons = {rejection.code for rejection in narrow.rejects(SHAPE, MACHINE)}
    assert len(reasons) == 2
    served = choose((narrow, FALLBACK), book((evidence(SHAPE, FALLBACK),)))
    assert (served.path, set(served.fallback_reasons)) == ("fallback", reasons)
    unserved = choose((narrow,), book())
    assert (unserved.path, set(unserved.fallback_reasons)) == (None, reasons)


def test_clearly_faster_competitor_is_no_fallback() -> None:
    decision = choose((FIRST, RIVAL), book((evidence(SHAPE, FIRST, 12.5), evidence(SHAPE, RIVAL, 10.0))))
    assert (decision.path, decision.wanted, decision.fallback_reasons) == ("rival", "rival", ())
    assert decision.notes == ("rival takes 10 us, first 12.5 us: the faster serves",)


@pytest.mark.parametrize(
    ("first", "rival"),
    [
        ({"p50_us": 11.9}, {"p50_us": 10.0}),  # not by a fifth
        ({"timing": Timing(14.0, 0.19, 20)}, {"timing": Timing(10.0, 0.19, 20)}),  # by less than what is unknown
        ({"p50_us": 50.0}, {"timing": Timing(10.0, 0.21, 20)}),  # its time is not believed
        ({"timing": Timing(50.0, 0.21, 20)}, {"p50_us": 10.0}),  # nor is this
        ({"p50_us": 50.0}, {"p50_us": 10.0, "checks": checks(2.0)}),
        ({"p50_us": 50.0}, {"p50_us": 10.0, "source_digest": "older"}),
    ],
)
def test_else_the_first_tier_serves_before_it(first: dict[str, object], rival: dict[str, object]) -> None:
    known = book((evidence(SHAPE, FIRST, **first), evidence(SHAPE, RIVAL, **rival)))
    for policy in Policy:
        decision = choose((FIRST, RIVAL), known, policy)
        assert (decision.path, decision.is_fallback) == ("first", False)


def test_cpu_competitor_is_a_fallback_elsewhere() -> None:
    paths = [replace(it, limits=replace(it.limits, devices=frozenset(Device))) for it in (FIRST, RIVAL)]
    for device in (Device.CUDA, Device.INTERPRETER):
        machine = replace(MACHINE, device=device)
        proofs = [evidence(SHAPE, it, us, fingerprint=machine) for it, us in zip(paths, (100.0, 1.0), strict=True)]
        known = book(tuple(proofs))
        for quarantined, served in ((NONE, "first"), (frozenset({("first", str(SHAPE))}), "rival")):
            decision = decide(
                SHAPE, paths=paths, fingerprint=machine, book=known, quarantined=quarantined, policy=Policy.REFUSE
            )
            assert (decision.path, decision.wanted, decision.is_fallback) == (served, "first", served == "rival")


DOUBTED = Timing(1.0, 0.35, 20)


def test_doubted_time_chooses_nothing_and_is_noted() -> None:
    third = path("third")
    known = book((evidence(SHAPE, FIRST, 50.0), evidence(SHAPE, OTHER, timing=DOUBTED), evidence(SHAPE, third, 20.0)))
    served = {order: choose(order, known).path for order in ((FIRST, OTHER, third), (OTHER, third, FIRST))}
    assert list(served.values()) == ["other", "other"]  # before the third, which is faster than the first
    decision = choose((FIRST, third, OTHER), known)
    assert (decision.path, decision.status, decision.is_fallback) == ("third", Status.PROVEN, False)
    assert decision.notes == ("other is not chosen by its time: spread 35%, at most 20% is believed",)


def test_a_time_below_its_floor_chooses_nothing_either() -> None:
    known = book((evidence(SHAPE, FIRST, 50.0), evidence(SHAPE, OTHER, 10.0, floor_us=13.0)))
    decision = choose((FIRST, OTHER), known)
    assert decision.path == "first"
    assert decision.notes[0].endswith("10 us, its floor is 13 us: faster than this machine can be")
    at_margin = book((evidence(SHAPE, FIRST, 50.0), evidence(SHAPE, OTHER, 10.0, floor_us=12.0)))
    assert choose((FIRST, OTHER), at_margin).path == "other"


def test_path_without_its_module_never_serves() -> None:
    absent = replace(FIRST, run=None)
    known = book((evidence(SHAPE, absent), evidence(SHAPE, OTHER)))
    for policy in Policy:
        decision = choose((absent, OTHER), known, policy)
        assert (decision.path, decision.wanted, decision.is_fallback) == ("other", "other", False)
        assert rejections(decision, "first") == [Reject.ARCH]
    assert "cannot be imported" in decision.candidates[0].rejections[0].detail
    small = replace(path("small", max_head_dim=32), run=None)
    assert rejections(choose((small, OTHER), known), "small") == [Reject.HEAD_DIM]  # what is known goes first


def test_failed_check_is_named_with_value_and_limit() -> None:
    place = {"every_row": (2.0, "row 5: off by 0.5"), "nonfinite": (3.0, "")}
    failed = tuple(
        replace(it, measured=place[it.name][0], where=place[it.name][1]) if it.name in place else it for it in checks()
    )
    decision = choose((FIRST,), book((evidence(SHAPE, FIRST, checks=failed),)))
    detail = decision.candidates[0].rejections[0].detail
    assert "every_row is 2 times its limit on ragged (row 5: off by 0.5)" in detail
    assert "nonfinite: 3 values on ragged, none may be" in detail
    assert "docs/limits.md" in detail
    raised = choose((FIRST,), book((evidence(SHAPE, FIRST, failure="RuntimeError: no"),)))
    assert raised.candidates[0].rejections[0].detail == "RuntimeError: no"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fingerprint": replace(MACHINE, torch="2.12.0")}, "torch"),
        ({"fingerprint": replace(MACHINE, driver="580.1")}, "driver"),
        ({"source_digest": "older"}, "source_digest"),
        ({"suite": SUITE - 1}, "suite"),
        ({"suite": SUITE + 1}, "suite"),
    ],
)
def test_stale_evidence_names_what_changed(changes: dict[str, object], name: str) -> None:
    own = evidence(SHAPE, FIRST, fingerprint=replace(MACHINE, cudnn="older"))  # the reviewed one is named
    decision = choose((FIRST, FALLBACK), book((evidence(SHAPE, FIRST, **changes), evidence(SHAPE, FALLBACK)), (own,)))
    assert (decision.path, decision.fallback_reasons) == ("fallback", (Reject.STALE,))
    details = [rejection.detail for candidate in decision.candidates for rejection in candidate.rejections]
    assert details == [f"changed since it was measured: {name}"]


def test_a_refused_matrix_is_the_reason_that_nothing_is_proven() -> None:
    decision = choose((FIRST,), book(problems=("a.json does not match its digest",)))
    assert (decision.path, decision.fallback_reasons) == (None, (Reject.MATRIX_INVALID,))
    assert decision.candidates[0].rejections[0].detail == "a.json does not match its digest"


@pytest.mark.parametrize("changed", [{}, {"source_digest": "older"}])
def test_own_evidence_does_not_hide_that_a_matrix_was_refused(changed: dict[str, str]) -> None:
    known = book(own=(evidence(SHAPE, FIRST, **changed),), problems=("a.json does not match its digest",))
    (candidate,) = choose((FIRST,), known).candidates
    assert candidate.rejections[0].detail.endswith("; refused of the matrix: a.json does not match its digest")


def test_an_empty_catalog_is_an_error() -> None:
    with pytest.raises(ValueError, match="catalog is empty"):
        choose((), book())


# --- properties: random catalogs, evidence and quarantines -----------------------------------------------------------

path_strategy = st.builds(
    lambda name, tier, limits, competes_on: replace(path(name, tier, **limits), competes_on=competes_on),
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.sampled_from(Tier),
    st.sampled_from(
        [
            {},
            {},
            {"max_head_dim": 32},
            {"devices": frozenset({Device.CUDA})},
            {"phases": frozenset({Phase.DECODE})},
            {"phases": frozenset({Phase.DECODE}), "devices": frozenset({Device.CUDA})},
        ]
    ),
    st.sampled_from([frozenset(), frozenset({Device.CPU})]),
)
catalogs = st.lists(path_strategy, min_size=1, max_size=5, unique_by=lambda it: it.name).map(tuple)
other_machines = st.dictionaries(
    st.sampled_from([field.name for field in fields(Fingerprint) if field.name != "device"]),
    st.sampled_from(["another", None]),
    min_size=1,
).map(lambda values: {"fingerprint": replace(MACHINE, **values)})
changes = other_machines | st.sampled_from(
    [
        {}, {}, {}, {}, {"checks": checks(2.0)}, {"checks": ()}, {"failure": "RuntimeError: no"}, {"timing": None},
        {"timing": DOUBTED}, {"suite": SUITE - 1}, {"source_digest": "older"}, {"tested_context_tokens": 129},
    ]
)  # fmt: skip


MAY_SERVE = {
    Policy.REFUSE: {Status.PROVEN},
    Policy.QUALIFY: {Status.PROVEN, Status.PROVISIONAL},
    Policy.DEGRADE: {Status.PROVEN, Status.PROVISIONAL, Status.STALE, Status.UNPROVEN},
}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[KernelPath, ...], Book, frozenset[tuple[str, str]]]:
    catalog = draw(catalogs)

    def some() -> tuple[Evidence, ...]:
        chosen = draw(st.lists(st.sampled_from(catalog), unique_by=lambda it: it.name))
        return tuple(
            evidence(SHAPE, it, **({"p50_us": draw(st.sampled_from([1.0, 2.0, 3.0]))} | draw(changes))) for it in chosen
        )

    quarantined = draw(st.lists(st.sampled_from(catalog), max_size=2))
    problems = draw(st.sampled_from([(), ("a file is truncated",)]))
    return catalog, book(some(), some(), problems), frozenset((it.name, str(SHAPE)) for it in quarantined)


def valid(known: Book, kernel: KernelPath, *, is_reviewed: bool) -> bool:
    source = known.reviewed.evidence if is_reviewed else known.own
    found = source.get((SHAPE, kernel.name))
    if found is None or not found.is_proven:
        return False
    return (found.fingerprint, found.source_digest, found.suite) == (MACHINE, kernel.source_digest, SUITE)


@given(worlds(), st.sampled_from(Policy))
def test_a_decision_keeps_its_contract_in_any_world(world: tuple, policy: Policy) -> None:
    """Written from the words of the contract, without looking at how `decide` finds it."""
    catalog, known, quarantined = world
    decision = choose(catalog, known, policy, quarantined)
    turned = Book(known.reviewed, dict(reversed(known.own.items())))
    assert decision == choose(catalog, turned, policy, quarantined)
    names = [candidate.path for candidate in decision.candidates]
    assert sorted([*names, decision.path] if decision.path else names) == sorted(it.name for it in catalog)
    if decision.is_fallback and decision.wanted != decision.path:
        assert set(decision.fallback_reasons) == set(rejections(decision, decision.wanted))
    if decision.path is None:
        assert decision.is_fallback
        assert all(candidate.rejections for candidate in decision.candidates)
        return
    chosen = next(it for it in catalog if it.name == decision.path)
    assert chosen.rejects(SHAPE, MACHINE) == ()
    assert (decision.path, str(SHAPE)) not in quarantined
    assert decision.status in MAY_SERVE[policy]
    assert (decision.status is Status.PROVEN) <= valid(known, chosen, is_reviewed=True)
    assert (decision.status is Status.PROVISIONAL) <= valid(known, chosen, is_reviewed=False)
    assert (decision.matrix_digest is not None) == (decision.status is Status.PROVEN)
    first = [it for it in catalog if it.tier is Tier.FIRST and it.run is not None and not it.rejects(SHAPE, MACHINE)]
    may_go_first = Device.CPU in chosen.competes_on and bool(first)
    is_good = (
        (chosen.tier is Tier.FIRST or may_go_first)
        and decision.status in MAY_SERVE[Policy.QUALIFY]
        and decision.wanted == decision.path
    )
    assert decision.is_fallback == (not is_good)


@given(worlds())
def test_stricter_policy_serves_no_more_than_a_laxer_one(world: tuple) -> None:
    catalog, known, quarantined = world
    served = [choose(catalog, known, policy, quarantined).path is not None for policy in Policy]
    assert served == sorted(served)


SUMS = CollectiveShape(Dtype.BF16, 4096, 2, Follows.ADD_NORM, TokenRows.LE_16)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "590", "13.0", "9.19", "2.11.0", "3.6.0")
REFUSED = without_peer_memory(COLLECTIVE_PATHS, "cuIpcOpenMemHandle_v2 failed on rank 1 of 2")


@pytest.mark.parametrize(
    ("paths", "path", "reasons"),
    [
        (COLLECTIVE_PATHS, "triton.collective.push", (Reject.UNPROVEN,)),
        (REFUSED, "nccl.collective", (Reject.PEER_MEMORY,)),
    ],
)
def test_sums_fall_back_where_ranks_share_no_memory(
    paths: tuple[AnyPath, ...], path: str, reasons: tuple[Reject, ...]
) -> None:
    decision = decide(SUMS, paths=paths, fingerprint=H200, book=Book(), quarantined=frozenset(), policy=Policy.DEGRADE)
    assert (decision.path, decision.wanted, decision.fallback_reasons) == (path, "triton.collective.push", reasons)


def test_a_refused_path_is_not_measured() -> None:
    missing = missing_pairs([SUMS], paths=REFUSED, fingerprint=H200, book=Book(), quarantined=frozenset())
    assert [path.name for _, path in missing] == ["nccl.collective"]
