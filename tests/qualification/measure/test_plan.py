import logging
import resource
import threading
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from kernels.reference.oracle import attention_oracle
from kernels.system.device import read_fingerprint
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import KernelPath, Reject, Tier
from kernels.vocabulary.shape import AttentionShape, Dtype
from qualification.decision.decision import Policy, Status
from qualification.decision.model_shapes import AttentionSignature, ServingLimits, shapes_needed
from qualification.evidence.evidence import Evidence, Invariance, Timing
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import load_matrix, save_matrix
from qualification.measure.costs.ceilings import Ceilings
from qualification.measure.qualify import Bench, Pair, qualify
from qualification.measure.start_plan import MatrixVerdict, Plan, make_plan, own_file
from qualification.measure.trials.failures import QualificationAborted
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

CPU = torch.device("cpu")
FIRST, FALLBACK = path("first"), path("fallback", Tier.FALLBACK)
SHAPES = (SHAPE, DECODE)


def silent(*_: object) -> None:
    pass


class Measurer:
    """Stands in for a qualification run: gives the evidence it is told to, and remembers what it was asked."""

    def __init__(self, **changes: object) -> None:
        self.asked: list[tuple[AttentionShape, str]] = []
        self._changes = changes

    def __call__(self, pairs: list[Pair], bench: Bench, *, progress: object, on_evidence: object) -> None:  # noqa: ARG002
        for shape, kernel in pairs:
            self.asked.append((shape, kernel.name))
            on_evidence(evidence(shape, kernel, **({"fingerprint": bench.fingerprint} | self._changes)))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "matrices", tmp_path / "cache"


def plan(folders: tuple[Path, Path], measurer: object, policy: Policy = Policy.QUALIFY, **changes: object) -> Plan:
    arguments = {"fingerprint": MACHINE, "quarantined": frozenset(), "paths": (FIRST, FALLBACK)} | changes
    return make_plan(
        SHAPES,
        policy=policy,
        device=CPU,
        matrix_dir=folders[0],
        cache_dir=folders[1],
        progress=silent,
        run_qualification=measurer,
        **arguments,
    )


def is_servable(made: Plan) -> bool:
    return all(decision.path is not None for decision in made.decisions.values())


class OrderMeasurer(Measurer):
    """The same, and says of each path that claims an order whether its bits hold."""

    def __init__(self, variant: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._variant = variant

    def __call__(self, pairs: list[Pair], bench: Bench, *, progress: object, on_evidence: object) -> None:
        def add(found: Evidence) -> None:
            order = next(kernel.order for _, kernel in pairs if kernel.name == found.path)
            seen = Invariance(order or "none", 9, int(found.path in self._variant), (("a", "same"),))
            on_evidence(replace(found, invariance=seen if bench.checks_orders else None))

        super().__call__(pairs, bench, progress=progress, on_evidence=add)


def test_a_reproducible_start_measures_order_after_order(folders: tuple[Path, Path]) -> None:
    orders = {"fast": None, "one": "k16", "two": "k32", "three": "k64"}
    paths = tuple(replace(path(name), order=order) for name, order in orders.items())
    start = {"paths": paths, "reproducible": True}
    measurer = OrderMeasurer(variant=("one",))
    made = plan(folders, measurer, **start)
    assert measurer.asked == [(shape, name) for name in ("one", "two") for shape in SHAPES]
    assert {(it.path, it.order, it.wanted) for it in made.decisions.values()} == {("two", "k32", "one")}
    assert made.order_problems == ()
    again = OrderMeasurer()
    assert plan(folders, again, **start).decisions == made.decisions  # from what the first start has kept
    assert again.asked == []
    # What serves no more in one shape is not replaced by another order.
    redecided = made.redecide(SHAPE, frozenset({("two", str(SHAPE))}), frozenset())
    assert (redecided.path, redecided.status) == (None, Status.QUARANTINED)
    alone = plan(folders, OrderMeasurer(), **(start | {"paths": paths[:2]}))
    assert [str(shape) in alone.order_problems[0] for shape in SHAPES] == [True, True]
    assert not is_servable(alone)


def test_shapes_of_a_tower_need_no_order_in_a_reproducible_start(folders: tuple[Path, Path]) -> None:
    fast, ordered = replace(path("fast"), order=None), replace(path("one"), order="k16")
    *of_text, of_tower = SHAPES
    measurer = OrderMeasurer()
    made = plan(folders, measurer, paths=(fast, ordered), reproducible=True, of_towers=frozenset({of_tower}))
    assert {shape: (it.path, it.order) for shape, it in made.decisions.items()} == {
        **dict.fromkeys(of_text, ("one", "k16")),
        of_tower: ("fast", None),
    }
    assert (of_tower, "fast") in measurer.asked


def review(folders: tuple[Path, Path], *proofs: Evidence) -> Path:
    file = folders[0] / gpu_folder(MACHINE.gpu) / "demo.json"
    save_matrix(file, proofs)
    return file


def test_without_any_evidence_every_able_path_is_measured(folders: tuple[Path, Path]) -> None:
    measurer = Measurer()
    made = plan(folders, measurer)
    assert measurer.asked == ALL
    assert {decision.status for decision in made.decisions.values()} == {Status.PROVISIONAL}
    assert made.matrix_verdict is MatrixVerdict.ABSENT
    assert is_servable(made)
    assert set(made.evidence) == set(measurer.asked)


ALL = [(shape, name) for shape in SHAPES for name in ("first", "fallback")]
NEWER_TORCH, NEWER_PATHS = replace(MACHINE, torch="2.14.0"), (replace(FIRST, source_digest="newer"), FALLBACK)
RAISED = {"checks": (), "failure": "OutOfMemoryError: full"}
# What it shows: what the first start finds, arguments of the second; what that measures, the status, files of evidence.
SECOND_STARTS = {
    "nothing has changed": ({}, {}, [], Status.PROVISIONAL, 1),
    "another stack": ({}, {"fingerprint": NEWER_TORCH}, ALL, Status.PROVISIONAL, 2),
    "another source": ({}, {"paths": NEWER_PATHS}, ALL[::2], Status.PROVISIONAL, 1),
    "a failed check stays": ({"checks": checks(2.0)}, {}, [], Status.FAILED, 1),
    "what raised is tried again": (RAISED, {}, ALL, Status.PROVISIONAL, 1),
}


@pytest.mark.parametrize("name", SECOND_STARTS)
def test_a_second_start_measures_only_what_it_must(folders: tuple[Path, Path], name: str) -> None:
    changes, arguments, asked, status, num_files = SECOND_STARTS[name]
    found = {decision.status for decision in plan(folders, Measurer(**changes)).decisions.values()}
    assert found == {Status.FAILED if changes else Status.PROVISIONAL}
    measurer = Measurer()
    made = plan(folders, measurer, **arguments)
    assert measurer.asked == asked
    assert {decision.status for decision in made.decisions.values()} == {status}
    assert is_servable(made) == (status is Status.PROVISIONAL)
    assert len(list(folders[1].glob("*.json"))) == num_files


@pytest.mark.parametrize("policy", [Policy.REFUSE, Policy.DEGRADE])
def test_only_qualify_measures(folders: tuple[Path, Path], policy: Policy) -> None:
    measurer = Measurer()
    made = plan(folders, measurer, policy)
    assert measurer.asked == []
    assert is_servable(made) == (policy is Policy.DEGRADE)


def test_what_the_matrix_proves_is_not_measured(folders: tuple[Path, Path]) -> None:
    review(folders, evidence(SHAPE, FIRST))
    measurer = Measurer()
    made = plan(folders, measurer)
    assert measurer.asked == [(DECODE, "first"), (DECODE, "fallback")]
    assert [made.decisions[shape].status for shape in SHAPES] == [Status.PROVEN, Status.PROVISIONAL]
    assert made.matrix_verdict is MatrixVerdict.VALID


def test_servers_that_share_a_folder_keep_what_each_has_proven(folders: tuple[Path, Path]) -> None:
    """One starts, and is ready, between two pairs of the other."""

    class Slow(Measurer):
        def __call__(self, pairs: list[Pair], *arguments: object, **options: object) -> None:
            super().__call__(pairs[:1], *arguments, **options)
            plan(folders, Measurer(p50_us=30.0))
            super().__call__(pairs[-1:], *arguments, **options)

    plan(folders, Slow())
    (cache,) = folders[1].glob("*.json")
    found = {key: entry.timing.p50_us for key, entry in load_matrix(cache).evidence.items()}
    assert found == {(SHAPE, "first"): 10.0, (DECODE, "first"): 30.0, (DECODE, "fallback"): 10.0}


def test_servers_that_start_at_the_same_moment_lose_nothing(folders: tuple[Path, Path]) -> None:
    servers = [(path(f"{name} path"), path(f"{name} other")) for name in ("one", "another", "a third")]
    turn = threading.Barrier(len(servers), timeout=30)

    class InStep(Measurer):
        def __call__(self, pairs: list[Pair], *arguments: object, **options: object) -> None:
            for pair in pairs:
                turn.wait()
                super().__call__([pair], *arguments, **options)

    threads = [threading.Thread(target=plan, args=(folders, InStep()), kwargs={"paths": each}) for each in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {name for _, name in load_matrix(own_file(folders[1], "evidence", MACHINE)).evidence}
    assert names == {each.name for paths in servers for each in paths}


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_cache_broken_during_the_run_is_written_anew(folders: tuple[Path, Path], content: bytes) -> None:
    class Broken(Measurer):
        def __call__(self, pairs: list[Pair], *arguments: object, **options: object) -> None:
            for pair in pairs:
                super().__call__([pair], *arguments, **options)
                if pair != pairs[-1]:
                    own_file(folders[1], "evidence", MACHINE).write_bytes(content)

    assert is_servable(plan(folders, Broken()))
    assert len(load_matrix(own_file(folders[1], "evidence", MACHINE)).evidence) == 4


@pytest.mark.parametrize("damage", ["cut short", "copied from another stack"])
def test_a_useless_cache_is_measured_anew_with_a_warning(
    folders: tuple[Path, Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan(folders, Measurer(), fingerprint=MACHINE if damage == "cut short" else NEWER_TORCH)
    (cache,) = folders[1].glob("*.json")
    if damage == "cut short":
        cache.write_bytes(cache.read_bytes()[:-9])
    cache = cache.rename(own_file(cache.parent, "evidence", MACHINE))
    measurer = Measurer()
    with caplog.at_level(logging.WARNING):
        assert is_servable(plan(folders, measurer))
    assert measurer.asked == ALL
    refused = "own evidence is refused and measured again"
    assert (refused if damage == "cut short" else "was measured on another stack") in caplog.text
    assert len(load_matrix(cache).evidence) == 4


def test_quarantined_pairs_are_neither_measured_nor_chosen(folders: tuple[Path, Path]) -> None:
    measurer = Measurer()
    made = plan(folders, measurer, quarantined=frozenset({("first", str(SHAPE))}))
    assert measurer.asked == ALL[1:]
    again = plan(folders, Measurer()).redecide(SHAPE, frozenset({("first", str(SHAPE))}), frozenset())
    for decision in (made.decisions[SHAPE], again):
        assert (decision.path, decision.fallback_reasons) == ("fallback", (Reject.QUARANTINED,))


def test_a_stale_matrix_says_so_and_the_machine_proves_itself(folders: tuple[Path, Path]) -> None:
    older = replace(MACHINE, torch="2.12.0")
    review(folders, *(evidence(shape, FIRST, fingerprint=older) for shape in SHAPES))
    made = plan(folders, Measurer())
    assert made.matrix_verdict is MatrixVerdict.STALE
    assert {decision.status for decision in made.decisions.values()} == {Status.PROVISIONAL}
    assert {made.evidence[shape, FIRST.name].fingerprint for shape in SHAPES} == {MACHINE}
    assert not is_servable(plan(folders, Measurer(), Policy.REFUSE))


def test_a_matrix_folder_without_this_machine_is_named(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of one GPU in place of the one around it, say."""
    inner = folders[0] / gpu_folder(MACHINE.gpu)
    save_matrix(inner / "demo.json", [evidence(shape, FIRST) for shape in SHAPES])
    plan(folders, Measurer())
    assert caplog.text == ""
    plan((inner, folders[1]), Measurer())
    assert f"--matrix {inner} proves nothing: {inner / inner.name} holds no matrix of this machine" in caplog.text


def test_a_tampered_matrix_proves_nothing(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    file = review(folders, *(evidence(shape, FIRST) for shape in SHAPES))
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.4", 1))
    made = plan(folders, Measurer(), Policy.REFUSE)
    assert made.matrix_verdict is MatrixVerdict.INVALID
    assert {decision.fallback_reasons for decision in made.decisions.values()} == {(Reject.MATRIX_INVALID,)}
    assert "matrix refused: demo.json does not match its digest" in caplog.text


def test_unwritable_cache_costs_only_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    made = plan((tmp_path / "matrices", tmp_path / "file" / "cache"), Measurer())
    assert is_servable(made)
    warning = f"cannot be kept for the next start in {tmp_path / 'file' / 'cache'}: Not a directory"
    assert len(made.evidence) > 1
    assert caplog.text.count(warning) == 1, "one warning, not one for each measured pair"


def test_a_full_disk_is_reported_with_the_folder(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Limit the size of files: as with a full disk a write fails, and its error names no file."""
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, was))
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, was[1]))
    made = plan(folders, Measurer())
    resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert is_servable(made)
    assert f"cannot be kept for the next start in {folders[1]}: File too large" in caplog.text


# --- real runs, on one small shape ------------------------------------------------------------------------------------


def right(q, k, v, batch, flags, out) -> None:
    out.copy_(attention_oracle(q, k, v, batch, flags))


def off_by_a_little(q, k, v, batch, flags, out) -> None:
    right(q, k, v, batch, flags, out)
    out += 1e-3


def raising(*_: object) -> None:
    raise RuntimeError("no kernel image is available")


def run(kernel: KernelPath, shape: AttentionShape = SHAPE, bench: Bench | None = None, **options: object) -> Evidence:
    found: list[Evidence] = []
    bench = bench or Bench(MACHINE, CPU)
    qualify([(shape, kernel)], bench, progress=silent, on_evidence=found.append, **options)
    (only,) = found
    return only


def trusting(*_: object, **__: object) -> tuple[object, ...]:
    """The trial of the checker has tests of its own."""
    return ()


def test_a_right_path_gets_proof_with_its_speed() -> None:
    found = run(replace(FIRST, run=right), check_checker=trusting)
    assert found.is_proven
    assert (found.tested_query_tokens, found.tested_context_tokens) == (128, 128)
    assert found.timing.p50_us > 0
    assert found.floor_us > 0
    flops = 4 * (128 * 129 // 2) * 64 * 4
    assert found.tflops == pytest.approx(flops / found.timing.p50_us * 1e-6, rel=1e-2)
    bytes_moved = 2 * 128 * 64 * 4 * (4 + 2)
    assert found.bytes_per_second == pytest.approx(bytes_moved / found.timing.p50_us * 1e6, rel=1e-2)


def test_floor_uses_the_higher_of_both_rates() -> None:
    rates = cycle([Ceilings(1e15, 1e9), Ceilings(1e9, 1e15)])
    found = run(
        replace(FIRST, run=right), bench=Bench(MACHINE, CPU, rates=lambda *_: next(rates)), check_checker=trusting
    )
    flops, num_bytes = 4 * (128 * 129 // 2) * 64 * 4, 2 * 128 * 64 * 4 * (4 + 2)
    assert found.floor_us == pytest.approx(max(flops, num_bytes) / 1e15 * 1e6, rel=1e-3)


def test_time_below_its_floor_stays_in_doubt() -> None:
    asked: list[int] = []

    def rates(*_: object) -> Ceilings:
        asked.append(1)
        return Ceilings(1.0, 1.0)

    bench = Bench(MACHINE, CPU, rates=rates, timer=lambda *_, **__: Timing(100.0, 0.01, 20))
    found = run(replace(FIRST, run=right), bench=bench, check_checker=trusting)
    assert (found.is_proven, len(asked)) == (True, 6)
    assert "its floor is" in found.timing_doubt
    assert found.believed_timing is None


def test_winning_rival_is_timed_in_turns_first() -> None:
    first = replace(FIRST, run=right)
    rival = replace(FALLBACK, run=right, competes_on=frozenset({Device.CPU}))
    times = iter([Timing(5e6, 0.01, 20), Timing(4e6, 0.01, 20)])
    bench = Bench(MACHINE, CPU, timing_budget_s=0.01, rates=lambda *_: None, timer=lambda *_, **__: next(times))
    found: list[Evidence] = []
    pairs = [(SHAPE, first), (SHAPE, rival)]
    qualify(pairs, bench, progress=silent, on_evidence=found.append, check_checker=trusting)
    assert [entry.path for entry in found] == ["first", "fallback", "first", "fallback"]
    assert found[0].checks == found[2].checks
    assert all(entry.timing.p50_us < 4e6 for entry in found[2:])


def test_without_rates_a_time_has_no_floor() -> None:
    bench = Bench(MACHINE, CPU, rates=lambda *_: None)
    assert run(replace(FIRST, run=right), bench=bench, check_checker=trusting).floor_us is None


def test_a_wrong_path_gets_evidence_of_its_errors() -> None:
    found = run(replace(FIRST, run=off_by_a_little), check_checker=trusting)
    assert not found.is_proven
    assert {check.name for check in found.checks if not check.is_passed} == {
        "drawn_rows",
        "every_row",
        "bias",
    }


def test_a_path_that_raises_gets_evidence_of_its_failure() -> None:
    found = run(replace(FIRST, run=raising), check_checker=trusting)
    assert not found.is_proven
    assert found.failure == "RuntimeError: no kernel image is available"


def test_nothing_is_measured_when_the_checker_fails_its_trial() -> None:
    with pytest.raises(QualificationAborted, match="proves nothing"):
        run(replace(FIRST, run=raising), check_checker=lambda *_, **__: ("future key",))


def test_a_run_begins_with_the_wrong_kernels_of_its_dtypes() -> None:
    seen: list[object] = []

    def check_checker(*asked: object, **options: object) -> tuple[object, ...]:
        seen.append((asked, options))
        return ()

    pairs = [(SHAPE, replace(FIRST, run=right))]
    how = {"progress": lambda *line: seen.append(line), "on_evidence": seen.append, "check_checker": check_checker}
    qualify(pairs, Bench(MACHINE, CPU, seed=3), **how)
    proof = seen.pop(3)
    assert seen == [
        (0, 1, "wrong kernels, which must be refused"),
        ((frozenset({SHAPE.dtype}), CPU), {"seed": 3}),
        (0, 1, f"first: {SHAPE}"),
        (1, 1, "done"),
    ]
    assert proof.is_proven


@pytest.mark.gpu
def test_an_8b_qualifies_on_this_gpu_with_our_kernels_first(tmp_path: Path) -> None:
    device = torch.device("cuda")
    fingerprint = read_fingerprint(device)
    assert fingerprint.device is Device.CUDA
    made = make_plan(
        shapes_needed(AttentionSignature(32, 8, 128), ServingLimits(2048, 2048, 64, Dtype.BF16, Dtype.BF16)),
        policy=Policy.QUALIFY,
        fingerprint=fingerprint,
        device=device,
        matrix_dir=tmp_path,
        cache_dir=tmp_path,
        quarantined=frozenset(),
        progress=silent,
    )
    fallbacks = {
        str(shape): decision.fallback_reasons for shape, decision in made.decisions.items() if decision.is_fallback
    }
    assert fallbacks == {}
    assert all(decision.path.startswith(("gluon.", "triton.")) for decision in made.decisions.values())
