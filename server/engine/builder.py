"""Settings to a running engine: plan the attention, load the model, size the cache, warm every shape."""

import logging
import os
import time
from dataclasses import dataclass

import torch

from kernels.attention.batch import AttentionFlags
from kernels.catalog import PATHS
from kernels.device import read_fingerprint, torch_dtype
from kernels.launch import install_compile_counter, num_compiles
from qualification.decision import Pairs, Policy
from qualification.plan import Plan, fingerprint_digest
from server.engine.attention_timer import AttentionTimer, CpuDevice, CudaDevice
from server.engine.attestation import Attestor, Promises, probes_of
from server.engine.core import Engine, EngineOptions
from server.engine.dispatch import Dispatcher, NoPathError
from server.engine.graph_inputs import GraphInputs
from server.engine.graph_keys import GraphSizes, graph_keys, graph_sizes
from server.engine.graphs import CudaCapture, StepGraphs
from server.engine.limits import EngineLimits, choose_device, choose_limits
from server.engine.messages import AttestationReport, EngineReady
from server.engine.outcome import BatchError
from server.engine.overrides import Overrides
from server.engine.pages import PagePool
from server.engine.planning import Progress, Unservable, cache_folder, fingerprint_fields, plan_attention, plan_rows
from server.engine.quarantine import Quarantine
from server.engine.runner import ModelRunner
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.step_tokens import StepTokens
from server.engine.warmup import measure_peak_bytes, warm_up
from server.errors import SettingsError
from server.model.config import ModelConfig, kv_bytes_per_token
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.load import load_config, load_decoder, resolve_model
from server.settings import Settings

logger = logging.getLogger(__name__)

_DEFAULT_CPU_KV_TOKENS = 65536
# 114 graphs of 32 layers took 358 MiB, shared memory included: 100 KiB for each (H200, driver 580, Llama-3.1-8B shape).
_GRAPH_BYTES_A_LAYER = 128 * 1024


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    runner: ModelRunner
    ready: EngineReady
    attestor: Attestor
    attested: AttestationReport | None  # before ready; None where attestation is off
    overrides: Overrides
    quarantine: Quarantine


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a runner is made of besides its cache."""

    config: ModelConfig
    limits: EngineLimits
    decoder: Decoder
    dispatcher: Dispatcher
    device: torch.device
    graph_sizes: GraphSizes | None  # None where steps are not replayed

    def cache(self, num_pages: int) -> KVCache:
        dtype = torch_dtype(self.limits.kv_dtype)
        return KVCache.allocate(self.config, num_pages, self.limits.page_size, dtype, self.device)

    def tokens(self) -> StepTokens:
        num_rows = self.limits.max_num_seqs
        return StepTokens(max(num_rows, self.graph_sizes.max_sampled if self.graph_sizes else 0), self.device)

    def runner(self, kv: KVCache) -> ModelRunner:
        return ModelRunner(self.decoder, kv, self.dispatcher, self.tokens())


def build_engine(
    settings: Settings, quarantined: Pairs, progress: Progress, *, overridden: Pairs = frozenset()
) -> BuiltEngine:
    """Raises Unservable and StartError for an engine that will not serve; anything else is a fault."""
    install_compile_counter()
    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(_num_cores())
    folder = resolve_model(settings.model, settings.load_format)
    config = load_config(folder)
    limits = choose_limits(settings, config, device)
    fingerprint = read_fingerprint(device)
    quarantine = Quarantine(cache_folder(settings) / f"quarantine-{fingerprint_digest(fingerprint)[:16]}.json", PATHS)
    quarantined |= quarantine.pairs
    plan = plan_attention(
        settings,
        config,
        limits,
        fingerprint=fingerprint,
        device=device,
        quarantined=quarantined,
        overridden=overridden,
        progress=progress,
    )
    progress("loading", str(folder))
    decoder = load_decoder(
        folder,
        config,
        dtype=torch_dtype(limits.dtype),
        device=device,
        load_format=settings.load_format,
        progress=lambda detail: progress("loading", detail),
    )
    flags = tuple(AttentionFlags(config.softmax_scale, window=w, softcap=config.softcap) for w in config.windows)
    timer = AttentionTimer(flags, CudaDevice() if device.type == "cuda" else CpuDevice())
    dispatcher = Dispatcher(
        plan.decisions,
        PATHS,
        flags,
        redecide=plan.redecide,
        timer=timer,
        quarantined=quarantined,
        overridden=overridden,
    )
    is_graphed = settings.cuda_graphs and device.type == "cuda"
    sizes = _graph_sizes(config, limits, limits.max_model_len) if is_graphed else None
    parts = _Parts(config, limits, decoder, dispatcher, device, sizes)
    try:
        runner = _warm_runner(settings, parts, plan, progress)
    except (BatchError, NoPathError) as error:
        raise Unservable(str(error), plan_rows(plan.decisions, plan.evidence)) from error
    engine = _engine(settings, parts, runner)
    attestor = _attestor(settings, parts, runner, plan)
    if settings.attestation_interval_s:
        progress("attesting", "a forward pass of each path under the profiler")
    attested = attestor.attest_all("start") if settings.attestation_interval_s else None
    timer.start()
    ready = EngineReady(
        pid=os.getpid(),
        model=str(folder),
        max_model_len=engine.max_len,
        num_pages=runner.num_pages,
        page_size=limits.page_size,
        fingerprint=fingerprint_fields(fingerprint),
        matrix_digest=plan.matrix_digest,
        matrix_verdict=plan.matrix_verdict.value,
        plan=plan_rows(dispatcher.decisions, plan.evidence),
        attention_layers=config.num_layers,
        num_compiles=num_compiles(),
    )
    return BuiltEngine(engine, runner, ready, attestor, attested, Overrides(dispatcher, plan.evidence), quarantine)


def _warm_runner(settings: Settings, parts: _Parts, plan: Plan, progress: Progress) -> ModelRunner:
    """A runner with its whole cache, every planned kernel compiled and every graph captured.

    Raises BatchError where a shape cannot run.
    """
    kv = parts.cache(_num_pages(settings, parts))
    runner = parts.runner(kv)
    warm_up(
        runner,
        plan.decisions,
        parts.limits,
        is_cuda=parts.device.type == "cuda",
        progress=lambda detail: progress("compiling", detail),
    )
    if parts.graph_sizes is None:
        return runner
    tokens = parts.tokens()
    graphs = _capture_graphs(parts, parts.graph_sizes, kv, tokens, progress)
    return ModelRunner(parts.decoder, kv, parts.dispatcher, tokens, graphs)


def _graph_sizes(config: ModelConfig, limits: EngineLimits, max_context: int) -> GraphSizes:
    return graph_sizes(
        config,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_context=max_context,
    )


def _capture_graphs(
    parts: _Parts, sizes: GraphSizes, kv: KVCache, tokens: StepTokens, progress: Progress
) -> StepGraphs:
    """Every graph that sequences of these limits can reach."""
    device = parts.device
    max_context = min(parts.limits.max_model_len, kv.num_pages * kv.page_size)
    sizes = _graph_sizes(parts.config, parts.limits, max_context)
    keys = graph_keys(sizes)
    inputs = GraphInputs(
        keys,
        num_prompts=sizes.num_prompts,
        page_size=kv.page_size,
        num_pages=kv.num_pages,
        max_context=max_context,
        device=device,
    )
    graphs = StepGraphs(parts.decoder, kv, parts.dispatcher, sizes=sizes, inputs=inputs, tokens=tokens)
    torch.cuda.empty_cache()  # so that what is free now is free of what warm-up left behind
    started_at, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    graphs.capture(keys, CudaCapture(device), lambda detail: progress("capturing", detail))
    logger.info(
        "%d of %d graphs captured in %.1f s, %.0f MiB",
        len(graphs.keys),
        len(keys),
        time.monotonic() - started_at,
        (free_before - torch.cuda.mem_get_info(device)[0]) / 2**20,
    )
    return graphs


def _engine(settings: Settings, parts: _Parts, runner: ModelRunner) -> Engine:
    limits = parts.limits
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
    runs_ahead = settings.run_ahead and parts.device.type == "cuda"
    options = EngineOptions(parts.config.vocab_size, parts.config.eos_token_ids, settings.seed, runs_ahead)
    return Engine(scheduler, runner, options, num_compiles=num_compiles, take_samples=parts.dispatcher.take_samples)


def _attestor(settings: Settings, parts: _Parts, runner: ModelRunner, plan: Plan) -> Attestor:
    """Over the page that no sequence owns."""
    page_size = parts.limits.page_size
    max_len = min(parts.limits.max_model_len, runner.num_pages * page_size)
    return Attestor(
        runner,
        lambda: runner.attention,
        parts.dispatcher,
        Promises({path.name: path for path in PATHS}, plan.evidence),
        probes=probes_of(parts.dispatcher.decisions, page=runner.num_pages, page_size=page_size, max_len=max_len),
        device=parts.device,
        graph_kernels=runner.recorded_kernels,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
        interval_s=settings.attestation_interval_s,
    )


def _num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_pages(settings: Settings, parts: _Parts) -> int:
    """Pages of the KV cache: what the settings say, or what the memory takes. Raises SettingsError when too few."""
    limits, device = parts.limits, parts.device
    if settings.kv_cache_tokens is not None:
        num_pages = settings.kv_cache_tokens // limits.page_size
    elif device.type == "cpu":
        num_pages = -(-max(_DEFAULT_CPU_KV_TOKENS, limits.max_model_len) // limits.page_size)
    else:
        peak_bytes = measure_peak_bytes(parts.runner(parts.cache(1)), limits, device) + _graph_bytes(parts)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        kept_bytes = int(total_bytes * (1 - settings.gpu_memory_utilization))
        page_bytes = limits.page_size * kv_bytes_per_token(parts.config, limits.kv_dtype)
        num_pages = max(0, free_bytes - kept_bytes - peak_bytes) // page_bytes
    num_tokens = num_pages * limits.page_size
    if num_pages < 1 or (settings.max_model_len is not None and num_tokens < settings.max_model_len):
        wanted = settings.max_model_len or limits.page_size
        raise SettingsError(f"the KV cache has room for {num_tokens} tokens, max_model_len needs {wanted}")
    return num_pages


def _graph_bytes(parts: _Parts) -> int:
    """About what the graphs will take: their results, their largest step, and what the driver keeps for each."""
    sizes, config = parts.graph_sizes, parts.config
    if sizes is None:
        return 0
    keys = graph_keys(sizes)
    numbers_a_token = 3 * config.intermediate_size + 8 * config.hidden_size
    num_bytes = 4 * sizes.max_sampled * config.vocab_size + len(keys) * config.num_layers * _GRAPH_BYTES_A_LAYER
    return num_bytes + keys[0].num_tokens * numbers_a_token * parts.limits.dtype.num_bytes
