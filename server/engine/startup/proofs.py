"""Attestor, shadow check and replay of an engine, made for its settings and its model."""

from functools import partial
from random import Random

import torch

from kernels.catalog import ALL_PATHS, PATHS
from kernels.driver.driver_record import Recorder
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Mask
from kernels.vocabulary.value_shape import values_of
from qualification.attest.operator_promises import operator_promises
from qualification.decision.decision import Policy
from qualification.measure.start_plan import Plan
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.short_convolution import ShortConvolutionConfig
from server.engine.execution.followed_steps import HeadPasses
from server.engine.execution.forced_answers import ForcedAnswers, Precision
from server.engine.execution.runner import ModelRunner
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.attestation import Attestor, HeadProbes
from server.engine.proof.judgement import Judge, Promises
from server.engine.proof.rank_check import RankAnswers
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.proof.shadow_sample import blank_sample
from server.engine.proof.step_record import StepRecords, TimeStep
from server.engine.proof.step_times import StepTimes
from server.engine.proof.tower_attestation import TowerProbes
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Batch
from server.engine.startup.subject import Subject
from server.engine.startup.warmup import probes_of
from server.settings import Settings

_BatchTimes = StepTimes[Batch, torch.cuda.CUDAGraph]
_MOST_REPLAYED = 512  # tokens of a chunk, for which a request that comes meanwhile waits: 8 TFLOP of an 8B


def attestor_of(settings: Settings, subject: Subject, runner: ModelRunner, plan: Plan) -> Attestor:
    """Return the attestor, whose batches use the page that no sequence owns."""
    limits, dispatcher, device = subject.limits, runner.dispatcher, subject.device
    page_size = limits.page_size
    max_len = min(limits.max_model_len, runner.num_pages * page_size)
    recorder = Recorder(device) if device.type == "cuda" else None
    of_two = {path.name for path in PATHS if path.alternatives and limits.max_num_seqs > 1}
    promises = Promises({it.name: it for it in PATHS}, plan.evidence, {it.name: it for it in ALL_PATHS})
    records = StepRecords(
        runner,
        lambda: runner.attention,
        dispatcher,
        device=device,
        recorder=recorder,
        graph_kernels=runner.recorded_kernels,
        time_step=_step_times(runner, recorder),
    )
    towers, tower = None, runner.worker.tower
    if tower is not None and dispatcher.tower is not None:
        paths = {it.name: it for it in ALL_PATHS}
        towers = TowerProbes(tower, dispatcher.tower, paths, plan.evidence, device, recorder)
    head = None if runner.worker.head is None else _head_probes(runner, recorder, max_len)
    return Attestor(
        records,
        Judge(promises, lambda: operator_promises(dispatcher.all_decisions, plan.evidence, ALL_PATHS)),
        dispatcher,
        probes=probes_of(
            dispatcher.decisions, page=runner.num_pages, page_size=page_size, max_len=max_len, of_two=of_two
        ),
        towers=towers,
        head=head,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
        interval_s=settings.attestation_interval_s,
    )


def _head_probes(runner: ModelRunner, recorder: Recorder | None, max_len: int) -> HeadProbes:
    """Return the passes of the draft head that are attested: one for each (phase, path) of its kind of attention."""
    worker, dispatcher, passes = runner.worker, runner.dispatcher, HeadPasses(runner)
    assert worker.head is not None
    own = worker.head.attention
    kind = own.window, own.num_heads, own.num_kv_heads, own.head_dim, own.values, Mask.CAUSAL
    decisions = {
        shape: decision
        for shape, decision in dispatcher.decisions.items()
        if (shape.window, shape.num_heads, shape.num_kv_heads, shape.head_dim, values_of(shape), shape.mask) == kind
    }
    times = None
    if recorder is not None:
        capture = recorder.capture
        times = _BatchTimes(lambda _: passes.graph(capture), recorder.node_names, recorder.node_seconds)
    records = StepRecords(
        passes,
        lambda: worker.head_attention,
        dispatcher,
        device=worker.device,
        recorder=recorder,
        time_step=times or (lambda _: None),
    )
    size = worker.kv.page_size
    return HeadProbes(records, tuple(probes_of(decisions, page=runner.num_pages, page_size=size, max_len=max_len)))


def _step_times(runner: ModelRunner, recorder: Recorder | None) -> TimeStep:
    """Return what times the steps of an attestation: by the driver, where a CUDA graph can hold a step."""
    if recorder is None or not runner.dispatcher.is_capturable:
        return lambda _: None
    capture, worker = recorder.capture, runner.worker
    node_seconds = partial(recorder.node_seconds, launching=worker.others.repeating)
    return _BatchTimes(lambda batch: runner.step_graph(batch, capture), recorder.node_names, node_seconds)


def judge_blank(subject: Subject) -> None:
    """Judge a sample of zeros, so that a GPU loads its libraries now."""
    limits, attention = subject.limits, subject.config.attentions[0]
    blank = blank_sample(
        group=attention.num_heads // attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=torch_dtype(limits.dtype),
        kv_dtype=torch_dtype(limits.kv_dtype),
        device=subject.device,
    )
    blank.judge(Random(0))


def shadow_check_of(
    settings: Settings, subject: Subject, dispatcher: Dispatcher, others: RankAnswers | None
) -> ShadowCheck:
    """Return the check of the settings; `others`: answers of the other ranks, where there are some."""
    judge_blank(subject)
    return ShadowCheck(
        dispatcher,
        budget=settings.shadow_budget,
        interval_s=settings.shadow_interval_s,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
        others=others,
    )


def replay_of(
    settings: Settings, subject: Subject, runner: ModelRunner, scheduler: Scheduler, shadow: ShadowCheck
) -> Replay | None:
    """Return what computes answers again by the settings; None where they want none, or the model gives none.

    Bits must be equal under `reproducible`, but where a recurrent layer sums a prompt's chunks in another order than
    single tokens: the gated delta rule and the short convolution do not.
    """
    if subject.pools or not settings.shadow_budget or settings.replay_share == 0:
        return None
    limits, config = subject.limits, subject.config
    has_order = all(isinstance(it, GatedDeltaConfig | ShortConvolutionConfig) for it in config.recurrences)
    is_exact = settings.reproducible and has_order
    precision = None if is_exact else Precision.of(config, torch_dtype(limits.dtype), torch_dtype(limits.kv_dtype))
    forced = ForcedAnswers(runner, scheduler, precision, most_tokens=_MOST_REPLAYED)
    return Replay(forced, scheduler, shadow.budget, share=settings.replay_share)
