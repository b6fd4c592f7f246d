"""Measuring on a CPU: real paths, a real peer, and fakes that are wrong or cannot run."""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch

from bench.attention.cases import BenchCase
from bench.attention.fa3 import on_pages
from bench.attention.inputs import Inputs, make_inputs, repaged
from bench.attention.measure import graphed
from bench.attention.peers import Peer, Prepared, Unavailable, torch_peers
from bench.attention.run import CaseBench, Contender, contenders_of, measure_all, measure_case
from kernels.catalog import path_named
from kernels.reference.oracle import attention_oracle
from kernels.system.device import read_fingerprint
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import Dtype
from qualification.measure.costs.ceilings import Ceilings, ceilings_now, measure_ceilings
from qualification.measure.costs.timing import time_call
from support.bench_fakes import decode, extend, prefill

CPU = torch.device("cpu")
BENCH = CaseBench(CPU, Ceilings(1e12, 1e10), budget_s=0.002)


def contenders(*names: str) -> list[Contender]:
    return contenders_of([path_named(name) for name in names], torch_peers(CPU), read_fingerprint(CPU))


def contender_that(run: RunAttention) -> Contender:
    path = replace(path_named("sdpa.cpu"), name="fake", run=run)
    return contenders_of([path], [], read_fingerprint(CPU))[0]


@pytest.mark.parametrize("case", [prefill(64, sequences=2), decode(70, batch=3)], ids=str)
def test_contenders_are_right_and_beside_the_best_peer(case: object) -> None:
    rows, absent = measure_case(case, contenders("sdpa.cpu", "sdpa.math"), BENCH)
    assert [row.contender for row in rows] == ["sdpa.cpu", "sdpa.math", "cpu-flash"]
    assert absent == ()
    peer = rows[-1]
    for row in rows:
        assert row.is_right
        assert row.best_peer == "cpu-flash"
        assert row.ratio == pytest.approx(peer.timing.p50_us / row.timing.p50_us)
        assert row.tflops == pytest.approx(case.flops / row.timing.p50_us / 1e6)
        assert row.floor_us == pytest.approx(max(case.flops / 1e12, case.num_bytes / 1e10) * 1e6)
        assert any(word in name for name in row.kernels for word in ("attention", "mm"))


def broken(*_: object) -> None:
    raise RuntimeError("out of\nshared memory")


HUGE = replace(prefill(32), queries=(2**50,), keys=(2**50,))
SOFTCAP = "softcap: takes no softcap, the shape has 20"


@pytest.mark.parametrize(
    ("case", "asked", "measured", "reasons"),
    [
        (prefill(32), ("triton.decode", "sdpa.cpu"), ["sdpa.cpu", "cpu-flash"], {}),  # of another phase: no contender
        (prefill(32, softcap=20.0), ("sdpa.cpu", "sdpa.math"), ["sdpa.math"],
            {"sdpa.cpu": SOFTCAP, "cpu-flash": ".*softcap.*"}),
        (HUGE, ("sdpa.cpu",), [], dict.fromkeys(("sdpa.cpu", "cpu-flash"), "no memory for inputs: RuntimeError.*")),
        (prefill(32), broken, [], {"fake": "RuntimeError: out of shared memory"}),
        (decode(40, queries=(3,)), path_named("sdpa.cpu").run, [],
            {"fake": "takes at most 1 query tokens a sequence of decode"}),
    ],
)  # fmt: skip
def test_what_is_absent_from_a_case_has_its_reason(
    case: BenchCase, asked: tuple[str, ...] | RunAttention, measured: list[str], reasons: dict[str, str]
) -> None:
    rows, absent = measure_case(
        case, contenders(*asked) if isinstance(asked, tuple) else [contender_that(asked)], BENCH
    )
    assert [row.contender for row in rows] == measured
    assert len(rows) != 1 or rows[0].ratio is None  # no peer beside it
    found = {absence.contender: absence.reason for absence in absent}
    assert found.keys() == reasons.keys()
    assert all(re.fullmatch(reason, found[name], re.DOTALL) for name, reason in reasons.items())


def test_a_path_that_writes_nothing_but_once_is_wrong() -> None:
    """An earlier call's output must not pass for an answer."""
    right, calls = path_named("sdpa.cpu").run, []

    def stale(*args: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            right(*args)

    rows, _ = measure_case(prefill(32), [contender_that(stale)], BENCH)
    assert not rows[0].is_right
    assert rows[0].num_nonfinite == 32 * 4 * 64


def test_a_wrong_peer_is_not_compared_with() -> None:
    def prepare(inputs: Inputs) -> Prepared:
        return Prepared(lambda: torch.zeros_like(inputs.q), lambda output: output)

    peers = [Peer("zeros", "1", prepare), *torch_peers(CPU)]
    rows, _ = measure_case(prefill(32), contenders_of([], peers, read_fingerprint(CPU)), BENCH)
    assert {row.contender: row.is_right for row in rows} == {"zeros": False, "cpu-flash": True}
    assert {row.best_peer for row in rows} == {"cpu-flash"}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (extend(16, 40), "square"),
        (prefill(32, windows=(8,)), "no word for a window"),
        (prefill(32, sinks=True), "no word for a sinks"),
        (replace(prefill(32), queries=(20, 12), keys=(20, 12)), "one length"),
    ],
    ids=str,
)
def test_a_peer_says_what_it_cannot_compute(case: object, why: str) -> None:
    (peer,) = torch_peers(CPU)
    with pytest.raises(Unavailable, match=why):
        peer.prepare(make_inputs(case, CPU, seed=0))


def test_garbage_is_collected_before_a_run() -> None:
    """Collect before the run: garbage that is frozen stays for good."""

    class Held:
        itself: object = None

    held = Held()
    held.itself = held
    known = weakref.ref(held)
    del held
    measure_all([], [], BENCH, time_limit_s=None, say=print)
    gc.collect()
    assert known() is None


def test_no_case_starts_after_the_time_limit() -> None:
    said: list[str] = []
    cases = [prefill(32), prefill(64)]
    outcome = measure_all(cases, contenders("sdpa.cpu"), BENCH, time_limit_s=0.0, say=said.append)
    assert outcome.unmeasured == tuple(cases)
    assert said == []


@pytest.mark.parametrize("case", [decode(70, batch=3), extend(16, 40)], ids=str)
def test_other_pages_hold_the_same_keys_and_values(case: object) -> None:
    inputs = make_inputs(case, CPU, seed=0)
    other = repaged(inputs, 24, seed=1)
    assert other.k.shape[1] == 24
    answers = [attention_oracle(x.q, x.k, x.v, x.batch, x.flags).to(x.q.dtype) for x in (inputs, other)]
    assert torch.equal(*answers)


def test_a_peer_over_other_pages_takes_cases_in_pages_only() -> None:
    (peer,) = torch_peers(CPU)
    other = on_pages(peer, 24)
    assert other.name == "cpu-flash-page24"
    rows, _ = measure_case(decode(70), contenders_of([], [other], read_fingerprint(CPU)), BENCH)
    assert rows[0].is_right
    with pytest.raises(Unavailable, match="in no pages"):
        other.prepare(make_inputs(prefill(32), CPU, seed=0))


def test_prompts_are_given_as_a_server_gives_them() -> None:
    """One tensor of offsets where queries and keys are the same tokens: a kernel may have a faster variant for that."""
    batch = make_inputs(prefill(32), CPU, seed=0).batch
    assert batch.cu_seqlens_k is batch.cu_seqlens_q
    context = make_inputs(replace(prefill(32), queries=(16,), keys=(32,)), CPU, seed=0).batch
    assert context.cu_seqlens_k is not None
    assert context.cu_seqlens_k.tolist() == [0, 32]
    assert context.cu_seqlens_q.tolist() == [0, 16]


def test_the_longest_sequence_is_among_those_that_are_compared() -> None:
    lengths = (5,) * 40 + (200,) + (5,) * 40
    inputs = make_inputs(replace(prefill(32), queries=lengths, keys=lengths), CPU, seed=0)
    assert 200 + 199 in inputs.rows.tolist()
    assert len(inputs.rows) <= 48


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, again, other = (make_inputs(decode(40, batch=2), CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.k, again.k)
    assert torch.equal(first.batch.page_table, again.batch.page_table)
    assert not torch.equal(first.k, other.k)


def test_ceilings_are_rates_of_this_machine() -> None:
    x, source = torch.randn(400, 400), torch.zeros(2**23)
    target = torch.empty_like(source)
    product_s, copy_s = (time_call(it, CPU).p50_us * 1e-6 for it in (lambda: x @ x, lambda: target.copy_(source)))
    ceilings = measure_ceilings(CPU, torch.float32)
    assert 0.05 < ceilings.flops_per_second / (2 * 400**3 / product_s) < 20
    assert 0.05 < ceilings.bytes_per_second / (2 * source.nbytes / copy_s) < 20


def test_ceilings_beside_a_call_leave_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    ceilings = ceilings_now(CPU, torch.bfloat16, 2**20)
    assert torch.get_num_threads() == before
    assert 1e8 < ceilings.flops_per_second < 1e15
    assert 1e8 < ceilings.bytes_per_second < 1e15


@pytest.mark.gpu
@pytest.mark.timed
def test_ceilings_beside_a_call_are_those_of_a_gpu() -> None:
    ceilings = ceilings_now(torch.device("cuda"), torch.bfloat16, 2**20)
    large = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    assert 0.8 < ceilings.flops_per_second / large.flops_per_second < 1.25
    assert 0.8 < ceilings.bytes_per_second / large.bytes_per_second < 1.25


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2", "cudnn", "flex"])
@pytest.mark.parametrize("case", [prefill(256, sequences=2), decode(128, batch=2)], ids=str)
def test_a_peer_of_pytorch_is_right_on_a_gpu(name: str, case: object) -> None:
    from torch._inductor import config as inductor_config  # a second to import

    gpu = torch.device("cuda")
    case = replace(case, shape=replace(case.shape, dtype=Dtype.BF16, kv_dtype=Dtype.BF16))
    (peer,) = (peer for peer in torch_peers(gpu) if peer.name == name)
    with inductor_config.patch(compile_threads=1):  # else sixteen tests beside each other start sixteen processes each
        rows, absent = measure_case(case, contenders_of([], [peer], read_fingerprint(gpu)), replace(BENCH, device=gpu))
    assert absent == ()
    assert rows[0].is_right
    assert rows[0].kernels


CUDA = torch.device("cuda")


def prepared(fill: float) -> Prepared:
    """A call that alone holds the 64 MiB it reads, as a peer holds its own layout of keys and values."""
    source = torch.full((2**24,), fill, device=CUDA)
    return Prepared(lambda: source * 2, lambda output: output)


@pytest.mark.gpu
def test_replay_keeps_its_inputs_through_another_capture() -> None:
    first = graphed(prepared(1.0), CUDA)
    second = graphed(prepared(5.0), CUDA)  # the capture gives freed segments back to the driver
    assert torch.equal(first(), torch.full((2**24,), 2.0, device=CUDA))
    assert torch.equal(second(), torch.full((2**24,), 10.0, device=CUDA))
