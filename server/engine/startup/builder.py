"""Settings to a running engine: plan the attention, load the model, size the cache, warm every shape."""

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from kernels.batch import AttentionFlags
from kernels.catalog import PATHS
from kernels.device import read_fingerprint, torch_dtype, use_all_cores
from kernels.fingerprint import Fingerprint
from kernels.launch import install_compile_counter, num_compiles
from kernels.linear.fallbacks import MatmulFallbacks
from kernels.triton_cache import use_own_cache
from qualification.attest.driver_record import Recorder
from qualification.decision.decision import Pairs, Policy
from qualification.measure.qualify import DeviceLost, qualify
from qualification.measure.start_plan import Plan, RunQualification, own_file
from qualification.model.config import ModelConfig
from server.engine.attention.dispatch import Dispatcher, NoPathError
from server.engine.attention.launch_errors import blaming
from server.engine.attention.timer import AttentionTimer, CpuDevice, CudaDevice
from server.engine.execution.capture import CudaCapture
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.proof.attestation import Attestor, Promises
from server.engine.proof.operator_quarantine import OperatorQuarantine
from server.engine.proof.quarantine import Quarantine
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.proof.shadow_sample import blank_sample, judge_sample
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.startup.attention_plan import (
    Progress,
    Unservable,
    cache_folder,
    plan_attention,
    refuse_unserved,
)
from server.engine.startup.kv_sizing import check_weights_fit, num_pages
from server.engine.startup.limits import EngineLimits, choose_device, choose_limits, sizes_of_graphs
from server.engine.startup.matmul_tuning import choose_products
from server.engine.startup.warmup import estimate_longest_step_s, probes_of, warm_up
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.load.load import check_checkpoint, load_config, load_decoder, resolve_model
from server.protocol.messages import AttestationReport, EngineReady
from server.protocol.plan_rows import plan_rows
from server.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    runner: ModelRunner
    ready: EngineReady
    attestor: Attestor
    attested: AttestationReport | None  # before ready; None where attestation is off
    operator_quarantine: OperatorQuarantine
    quarantine: Quarantine
    shadow: ShadowCheck  # takes no samples until the runner has it, so that a bench times none


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is known of the model and the machine before anything is loaded."""

    folder: Path
    config: ModelConfig
    limits: EngineLimits
    device: torch.device
    fingerprint: Fingerprint


def build_engine(
    settings: Settings,
    quarantined: Pairs,
    progress: Progress,
    *,
    overridden: Pairs = frozenset(),
    run_qualification: RunQualification = qualify,
) -> BuiltEngine:
    """Raises Unservable and StartError for an engine that will not serve; anything else is a fault.

    Of faults, DeviceLost names who may be to blame, without whom the next start will do.
    """
    use_own_cache()
    install_compile_counter()
    subject = _subject(settings)
    quarantine = Quarantine(own_file(cache_folder(settings), "quarantine", subject.fingerprint), PATHS)
    broken = quarantined | quarantine.pairs
    try:
        plan = plan_attention(
            settings,
            subject.config,
            subject.limits,
            fingerprint=subject.fingerprint,
            device=subject.device,
            quarantined=broken,
            overridden=overridden,
            progress=progress,
            run_qualification=run_qualification,
        )
        return _build(settings, subject, plan, quarantine, broken, progress, overridden=overridden)
    except DeviceLost as error:
        if error.suspects:
            quarantine.add(error.suspects, f"the device was lost at a start: {error}")
        raise


def _build(
    settings: Settings,
    subject: _Subject,
    plan: Plan,
    quarantine: Quarantine,
    broken: Pairs,
    progress: Progress,
    *,
    overridden: Pairs,
) -> BuiltEngine:
    decoder, matmul_fallbacks = _load(settings, subject, progress)
    dispatcher = _dispatcher(subject, plan, quarantined=broken, overridden=overridden)
    try:
        runner = _warm_runner(settings, subject, decoder, dispatcher, plan, progress)
        longest_step_s = 0.0 if subject.device.type == "cuda" else estimate_longest_step_s(runner, subject.limits)
    except (BatchError, NoPathError) as error:
        raise Unservable(str(error), plan_rows(plan.decisions, plan.evidence)) from error
    engine = _engine(settings, subject, runner, matmul_fallbacks)
    attestor = _attestor(settings, subject, runner, plan)
    if settings.attestation_interval_s:
        progress("attesting", "a forward pass of each path under the profiler")
    with blaming(runner.suspects):
        attested = attestor.attest_all("start") if settings.attestation_interval_s else None
    refuse_unserved(dispatcher.plan, plan, settings, attested)
    if dispatcher.timer is not None:
        dispatcher.timer.start()
    shadow = _shadow_check(settings, subject, dispatcher)
    ready = _ready(subject, plan, engine, runner, matmul_fallbacks, longest_step_s=longest_step_s)
    operator_quarantine = OperatorQuarantine(dispatcher, plan.evidence)
    return BuiltEngine(engine, runner, ready, attestor, attested, operator_quarantine, quarantine, shadow)


def _subject(settings: Settings) -> _Subject:
    device = choose_device(settings)
    if device.type == "cpu":
        use_all_cores()
    folder = resolve_model(settings.model, settings.load_format)
    config = load_config(folder)
    limits = choose_limits(settings, config, device)
    check_weights_fit(config, limits, device)
    check_checkpoint(folder, config, settings.load_format)  # before attention is proven, which takes minutes
    return _Subject(folder, config, limits, device, read_fingerprint(device))


def _load(settings: Settings, subject: _Subject, progress: Progress) -> tuple[Decoder, MatmulFallbacks]:
    """Load the weights, and choose how they are multiplied."""
    config, limits, device = subject.config, subject.limits, subject.device
    progress("loading", str(subject.folder))
    decoder = load_decoder(
        subject.folder,
        replace(config, max_position=limits.max_model_len),  # LongRoPE's factors are those of the context served
        dtype=torch_dtype(limits.dtype),
        device=device,
        load_format=settings.load_format,
        progress=lambda detail: progress("loading", detail),
    )
    matmul_fallbacks = MatmulFallbacks()
    if settings.choose_matmuls and device.type == "cuda":
        progress("choosing", "algorithms of matmuls")
        file = own_file(cache_folder(settings), "products", subject.fingerprint)
        matmul_fallbacks = choose_products(decoder, limits, file, device)
    return decoder, matmul_fallbacks


def _dispatcher(subject: _Subject, plan: Plan, *, quarantined: Pairs, overridden: Pairs) -> Dispatcher:
    config, device = subject.config, subject.device
    layers = [layer.attention for layer in config.layers]
    flags = tuple(AttentionFlags(it.scale, window=it.window, softcap=it.softcap) for it in layers)
    return Dispatcher(
        plan.decisions,
        PATHS,
        flags,
        redecide=plan.redecide,
        timer=AttentionTimer(flags, CudaDevice() if device.type == "cuda" else CpuDevice()),
        quarantined=quarantined,
        overridden=overridden,
    )


def _ready(
    subject: _Subject,
    plan: Plan,
    engine: Engine,
    runner: ModelRunner,
    matmul_fallbacks: MatmulFallbacks,
    *,
    longest_step_s: float,
) -> EngineReady:
    return EngineReady(
        pid=os.getpid(),
        model=str(subject.folder),
        max_model_len=engine.max_len,
        num_pages=runner.num_pages,
        page_size=subject.limits.page_size,
        fingerprint=subject.fingerprint.values(),
        matrix_digest=plan.matrix_digest,
        matrix_verdict=plan.matrix_verdict.value,
        plan=plan_rows(runner.dispatcher.decisions, plan.evidence),
        attention_layers=subject.config.num_layers,
        num_compiles=num_compiles(),
        matmul_fallbacks=matmul_fallbacks.take(),
        longest_step_s=longest_step_s,
        is_bound_by_cache=engine.max_len < subject.limits.max_model_len,
    )


def _warm_runner(
    settings: Settings, subject: _Subject, decoder: Decoder, dispatcher: Dispatcher, plan: Plan, progress: Progress
) -> ModelRunner:
    """Return a runner with its whole cache, every planned kernel compiled and every graph captured.

    Raises BatchError where a shape cannot run.
    """
    config, limits, device = subject.config, subject.limits, subject.device
    has_graphs = settings.cuda_graphs and device.type == "cuda"
    sizes = sizes_of_graphs(config, limits, limits.max_model_len) if has_graphs else None
    num_rows = max(limits.max_num_seqs, 0 if sizes is None else sizes.max_sampled)

    def worker(pages: int) -> Worker:
        kv = KVCache.allocate(config, pages, limits.page_size, torch_dtype(limits.kv_dtype), device)
        return Worker(decoder, kv, dispatcher, SampledTokens(num_rows, device))

    own = worker(num_pages(settings, config, limits, device, sizes=sizes, small_runner=lambda: ModelRunner(worker(1))))
    runner = ModelRunner(own)
    with blaming(runner.suspects):
        warm_up(
            runner,
            plan.decisions,
            limits,
            is_cuda=device.type == "cuda",
            progress=lambda detail: progress("compiling", detail),
        )
    return runner if sizes is None else ModelRunner(own, _capture_graphs(subject, own, progress))


def _capture_graphs(subject: _Subject, worker: Worker, progress: Progress) -> StepGraphs:
    """Capture every graph that sequences of these limits can reach."""
    limits, device, kv = subject.limits, worker.device, worker.kv
    max_context = min(limits.max_model_len, kv.num_pages * kv.page_size)
    graphs = StepGraphs(worker, sizes_of_graphs(subject.config, limits, max_context), max_context=max_context)
    torch.cuda.empty_cache()  # so that what is free now is free of what warm-up left behind
    started_at, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    graphs.capture(CudaCapture(device), lambda detail: progress("capturing", detail))
    logger.info(
        "%d of %d graphs captured in %.1f s, %.0f MiB",
        len(graphs.keys),
        len(graphs.layouts),
        time.monotonic() - started_at,
        (free_before - torch.cuda.mem_get_info(device)[0]) / 2**20,
    )
    return graphs


def _engine(settings: Settings, subject: _Subject, runner: ModelRunner, matmul_fallbacks: MatmulFallbacks) -> Engine:
    config, limits = subject.config, subject.limits
    scheduler = Scheduler(
        SchedulerLimits(
            limits.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_num_interleaved_tokens,
        ),
        PagePool(runner.num_pages, limits.page_size),
        shares_pages=settings.prefix_caching,
    )
    runs_ahead = settings.run_ahead and subject.device.type == "cuda"
    options = EngineOptions(config.vocab_size, config.eos_token_ids, settings.seed, runs_ahead)
    return Engine(
        scheduler,
        runner,
        options,
        num_compiles=num_compiles,
        take_samples=runner.dispatcher.take_samples,
        take_fallbacks=matmul_fallbacks.take,
    )


def _attestor(settings: Settings, subject: _Subject, runner: ModelRunner, plan: Plan) -> Attestor:
    """Return the attestor, whose batches use the page that no sequence owns."""
    limits, dispatcher, device = subject.limits, runner.dispatcher, subject.device
    page_size = limits.page_size
    max_len = min(limits.max_model_len, runner.num_pages * page_size)
    of_two = {path.name for path in PATHS if path.alternatives and limits.max_num_seqs > 1}
    return Attestor(
        runner,
        lambda: runner.attention,
        dispatcher,
        Promises({path.name: path for path in PATHS}, plan.evidence),
        probes=probes_of(
            dispatcher.decisions, page=runner.num_pages, page_size=page_size, max_len=max_len, of_two=of_two
        ),
        device=device,
        recorder=Recorder(device) if device.type == "cuda" else None,
        graph_kernels=runner.recorded_kernels,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
        interval_s=settings.attestation_interval_s,
    )


def _shadow_check(settings: Settings, subject: _Subject, dispatcher: Dispatcher) -> ShadowCheck:
    """Return the check of the settings. One blank sample is judged here, so that a GPU loads its libraries now."""
    limits, attention = subject.limits, subject.config.layers[0].attention
    blank = blank_sample(
        group=attention.num_heads // attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=torch_dtype(limits.dtype),
        kv_dtype=torch_dtype(limits.kv_dtype),
        device=subject.device,
    )
    judge_sample(blank, Random(0))
    return ShadowCheck(
        dispatcher,
        budget=settings.shadow_budget,
        interval_s=settings.shadow_interval_s,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
    )
