from dataclasses import replace
from itertools import product

import pytest

from kernels.calls.batch import AttentionFlags
from kernels.hopper.decode.variants import DecodeVariant, variant_of
from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.decision.decision import Decision, Status
from qualification.decision.model_shapes import AttentionSignature, shapes_needed
from server.engine.operators.step_attention import Beat
from server.engine.scheduling.sequence import Batch
from server.engine.startup.limits import EngineLimits
from server.engine.startup.warmup import estimate_longest_silence_s, probes_of, synthetic_batch, warm_up
from support.engine.fake_runner import Done, FakeRunner

Found = tuple[set[Bucket], set[DecodeVariant]]  # the buckets of contexts, and the variants of decode


def limits(model_len: int, batched_tokens: int, seqs: int = 8) -> EngineLimits:
    return EngineLimits(Dtype.FP32, Dtype.FP32, model_len, seqs, batched_tokens, batched_tokens, page_size=16)


def drafting(subject: EngineLimits) -> EngineLimits:
    return replace(subject, max_drafted_tokens=3)


def plan(subject: EngineLimits) -> dict[AttentionShape, Decision]:
    shapes = shapes_needed(AttentionSignature(4, 2, 16), subject.serving)
    return {shape: Decision(shape, "a", Status.PROVEN, "a", (), (), None) for shape in shapes}


def layout_of(batch: Batch) -> tuple[Phase, Bucket, Bucket]:
    """Return the dispatcher's layout of a batch."""
    (phase,) = (phase for phase in Phase if batch.rows_of(phase))
    queries = Bucket.LE_128 if phase in (Phase.DECODE, Phase.VERIFY) else bucket_of(max(batch.query_lens))
    return phase, queries, bucket_of(max(batch.context_lens))


@pytest.mark.parametrize(
    ("model_len", "batched_tokens", "drafts"),
    [*product((100, 130, 600, 4096), (64, 129, 2048, 8192), [False]), (100, 64, True), (4096, 2048, True)],
)
def test_on_cuda_exactly_the_planned_shapes_run(model_len: int, batched_tokens: int, drafts: bool) -> None:
    spy, subject = FakeRunner(), limits(model_len, batched_tokens)
    subject = drafting(subject) if drafts else subject
    decisions = plan(subject)
    warm_up(spy, decisions, subject, is_cuda=True, progress=lambda _: None)
    planned = {(shape.phase, shape.query_bucket, shape.context_bucket) for shape in decisions}
    assert {layout_of(batch) for batch in spy.batches} == planned
    assert max(batch.num_tokens for batch in spy.batches) <= batched_tokens
    assert max(max(batch.context_lens) for batch in spy.batches) <= model_len
    assert max(batch.num_rows for batch in spy.batches) <= 8


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_every_variant_of_decode_that_service_can_meet_has_run(window: int | None) -> None:
    """Use a group of 4 and head dim 128, which has another tiling for much context."""
    for model_len, seqs in product((2048, 16384, 131072), (1, 5, 6, 40, 256)):
        met, ran = decode_variants(model_len, seqs, window)
        assert met == ran, f"{seqs} sequences of {model_len} tokens"


def decode_variants(model_len: int, seqs: int, window: int | None) -> tuple[Found, Found]:
    """Return the variants that service can meet, and those that the warm-up ran."""
    flags = AttentionFlags(0.1, window=window)

    def variant(num_seqs: int, context: int) -> DecodeVariant:
        return variant_of(128, 64, (32, 8), 1, num_seqs, context if window is None else min(context, window), flags)

    spy, subject = FakeRunner(), limits(model_len, 8192, seqs)
    decisions = {replace(shape, window=window): decision for shape, decision in plan(subject).items()}
    warm_up(spy, decisions, subject, is_cuda=True, progress=lambda _: None)
    met = {
        (bucket_of(n), variant(rows, n))
        for n in (1, *range(63, model_len + 1, max(61, model_len // 300)), model_len)
        for rows in range(1, seqs + 1)
    }
    decodes = [batch for batch in spy.batches if batch.rows_of(Phase.DECODE)]
    ran = {(bucket_of(max(it.context_lens)), variant(it.num_rows, max(it.context_lens))) for it in decodes}
    return split(met), split(ran)


def split(found: set[tuple[Bucket, DecodeVariant]]) -> Found:
    return {bucket for bucket, _ in found}, {variant for _, variant in found}


def test_on_a_cpu_each_phase_runs_once() -> None:
    spy, subject = FakeRunner(), drafting(limits(4096, 2048))
    warm_up(spy, plan(subject), subject, is_cuda=False, progress=lambda _: None)
    assert [layout_of(batch)[0] for batch in spy.batches] == list(Phase)
    assert sum(batch.num_tokens for batch in spy.batches) < 10


def test_the_longest_silence_is_estimated_from_a_fitting_prompt() -> None:
    class Beating(FakeRunner):
        beat: Beat | None = None

        def hear(self, beat: Beat | None) -> None:
            self.beat = beat

        def launch(self, batch: Batch) -> Done:
            assert self.beat is not None
            self.beat()
            return super().launch(batch)

    spy, times = Beating(), iter([10.0, 10.5, 10.75, 20.0, 20.5, 21.5])
    assert estimate_longest_silence_s(spy, limits(4096, 2048), spy.hear, lambda: next(times)) == 0.5 * 2048 / 256
    assert estimate_longest_silence_s(spy, limits(100, 2048), spy.hear, lambda: next(times)) == 1.0 * 2048 / 100
    assert [batch.num_tokens for batch in spy.batches] == [256, 100]
    assert spy.beat is None


def test_a_synthetic_batch_touches_page_0_only() -> None:
    batch = synthetic_batch([(2, 40), (5, 17)], page_size=16)
    assert [list(table) for table in batch.page_tables] == [[0, 0, 0], [0, 0]]
    assert batch.rows_of(Phase.EXTEND) == range(2)


@pytest.mark.parametrize("max_len", [2, 3, 4, 5, 16, 17, 100, 1024, 1040])
def test_a_probe_of_each_phase_fits_and_sees_several_tokens(max_len: int) -> None:
    """Try a cache that holds less than the model's limit too, for which longer shapes were planned."""
    probes = probes_of(plan(drafting(limits(4096, 2048))), page=3, page_size=16, max_len=max_len)
    of_several_behind_others = (Phase.EXTEND, Phase.VERIFY)  # 2 after 1 token, at least
    wanted = [phase for phase in Phase if max_len > 2 or phase not in of_several_behind_others]
    assert [layout_of(batch)[0] for batch in probes] == wanted
    for batch in probes:
        assert 2 <= batch.context_lens[0] <= max_len
        assert batch.query_lens[0] > 1 or batch.rows_of(Phase.DECODE)
