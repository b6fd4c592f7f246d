"""Settings to a running engine: plan the attention, load the model, size the cache, warm every shape."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from kernels.calls.launch import install_compile_counter, num_compiles
from kernels.catalog import ALL_PATHS
from kernels.collective.inboxes import PeerMemoryError
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.system.device import torch_dtype
from kernels.system.device_lost import DeviceLost
from kernels.system.triton_cache import use_own_cache
from qualification.decision.decision import Pairs, Policy
from qualification.measure.qualify import qualify
from qualification.measure.start_plan import Plan, RunQualification, own_file
from server.engine.execution.capture import Capture, CudaCapture
from server.engine.execution.commands import ChooseProducts, KernelsCompiled, Started
from server.engine.execution.followers import Followers, LedRanks, RankListener
from server.engine.execution.grammars import Grammars
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.head_steps import HeadSteps
from server.engine.execution.page_bytes import DevicePageBytes
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import blaming
from server.engine.operators.linear import MeasuredProducts
from server.engine.proof.attestation import Attestor
from server.engine.proof.operator_quarantine import OperatorQuarantine
from server.engine.proof.quarantine import Quarantine
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.embeddings import EmbeddingFormat
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.head_drafter import DraftedRow, HeadDrafter, HeadRow
from server.engine.scheduling.page_seals import PageSeals
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError, StepStatistics
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.states import StatePool
from server.engine.startup.ahead import compiling_for, log_late, noted_compiles
from server.engine.startup.drafting import Drafting, drafting_of
from server.engine.startup.image_warmup import warm_up_images
from server.engine.startup.kv_sizing import num_pages
from server.engine.startup.layers import check_layers, refuse_failed
from server.engine.startup.limits import sizes_of_graphs
from server.engine.startup.matmul_tuning import choose_products
from server.engine.startup.plan import (
    EvidenceFolders,
    Progress,
    Unservable,
    cache_folder,
    plan_operators,
    refuse_unserved,
)
from server.engine.startup.proofs import attestor_of, replay_of, shadow_check_of
from server.engine.startup.state_sizing import state_slots
from server.engine.startup.subject import (
    Subject,
    connected_ranks,
    decoder_of,
    dispatcher_of,
    head_of,
    identity_of,
    kv_cache_of,
    load_own_tower,
    load_weights,
    read_subject,
)
from server.engine.startup.warmup import estimate_longest_silence_s, synthetic_batch, warm_up
from server.errors import SettingsError
from server.model.decoder import Decoder
from server.model.draft_head import DraftHead
from server.model.layer_state import StateCache
from server.model.ranks import ALONE
from server.model.vision.tower import Tower
from server.protocol.messages import AttestationReport, EngineReady, LayersReport, PlanRow, ServedPath
from server.protocol.plan_rows import plan_rows
from server.settings import Settings

logger = logging.getLogger(__name__)


class NewCapture(Protocol):
    """Makes what records graphs of a device, as CudaCapture does."""

    def __call__(self, device: torch.device, /, *, names_kernels: bool = ...) -> Capture: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts that an engine computes with, loaded; nothing but products is launched yet."""

    decoder: Decoder
    head: DraftHead | None
    tower: Tower | None
    dispatcher: Dispatcher


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
    replay: Replay | None = None  # None where the settings want none; takes no answers until the engine has it
    followers: Followers | None = None  # the other ranks


def build_engine(
    settings: Settings,
    quarantined: Pairs,
    progress: Progress,
    *,
    overridden: Pairs = frozenset(),
    run_qualification: RunQualification = qualify,
    listener: RankListener | None = None,
) -> BuiltEngine:
    """Raises Unservable and StartError for an engine that will not serve; anything else is a fault.

    Of faults, DeviceLost names who may be to blame, without whom the next start will do. `listener` hears of the other
    ranks, where there are any.
    """
    use_own_cache()
    compiled = noted_compiles()
    install_compile_counter()
    subject = read_subject(settings)
    folders = EvidenceFolders.of(settings)
    quarantine = Quarantine(own_file(folders.own, "quarantine", subject.fingerprint), ALL_PATHS)
    broken = quarantined | quarantine.pairs
    listener = listener or RankListener()

    def on_failure(lost: DeviceLost) -> None:
        if lost.suspects:
            quarantine.add(lost.suspects, f"it failed on another rank than the first: {lost}")
        listener.on_failure(lost)

    def build(unshared: str | None) -> BuiltEngine:
        plan = plan_operators(
            subject,
            settings.on_unproven,
            folders,
            quarantined=broken,
            overridden=overridden,
            progress=progress,
            run_qualification=run_qualification,
            reproducible=settings.reproducible,
            unshared=unshared,
        )
        world = settings.tensor_parallel_size
        heard = replace(listener, on_failure=on_failure)
        followers = None if world == 1 else Followers(world, listener=heard, shares_memory=unshared is None)
        try:
            built = _build(settings, subject, followers, plan, quarantine, broken, progress, overridden=overridden)
            log_late(compiled)
            return built
        except BaseException:
            if followers is not None:
                followers.close()
            raise

    try:
        return build_or_without_peer_memory(build, settings)
    except DeviceLost as error:
        if error.suspects:
            quarantine.add(error.suspects, f"the device was lost at a start: {error}")
        raise


def build_or_without_peer_memory(build: Callable[[str | None], BuiltEngine], settings: Settings) -> BuiltEngine:
    """Build the engine, and where CUDA lets its ranks share no memory plan it again without.

    The plan chose paths that need it: others have to be decided, and proven where that is asked for. Raises
    SettingsError under REFUSE, which serves nothing but what was wanted.
    """
    try:
        return build(None)
    except PeerMemoryError as error:
        why = f"CUDA lets the ranks' processes share no memory, though their GPUs can address each other: {error}"
    advice = "run the ranks in one IPC namespace (--ipc=host), and on whole GPUs"
    if settings.on_unproven is Policy.REFUSE:
        raise SettingsError(f"{why}; {advice}, or allow sums by NCCL with another --on-unproven")
    logger.warning("%s; all sums over ranks go by NCCL: %s", why, advice)
    if dist.is_initialized():
        dist.destroy_process_group()  # of ranks that have ended
    return build(why)


def _build(
    settings: Settings,
    subject: Subject,
    followers: Followers | None,
    plan: Plan,
    quarantine: Quarantine,
    broken: Pairs,
    progress: Progress,
    *,
    overridden: Pairs,
) -> BuiltEngine:
    fallbacks = MatmulFallbacks()
    measured = MeasuredProducts.of(fallbacks.note)
    dispatcher = dispatcher_of(
        subject,
        plan.decisions,
        measured,
        redecide=plan.redecide,
        quarantined=broken,
        overridden=overridden,
    )
    with compiling_for(settings, subject, plan.decisions.values(), progress) as wait:
        loaded = _load(settings, subject, dispatcher, followers, progress, wait, measured=measured, fallbacks=fallbacks)
    take_fallbacks = fallbacks.take
    if followers is not None:
        take_fallbacks = partial(_fallbacks_of_all, fallbacks, followers)
    try:
        runner, scheduler, engine = warm_engine(
            settings, subject, loaded, followers, progress, take_fallbacks, CudaCapture
        )
        longest_silence_s = 0.0
        if subject.device.type == "cpu":
            longest_silence_s = estimate_longest_silence_s(
                runner, subject.limits, lambda beat: setattr(runner.worker, "beat", beat)
            )
    except (BatchError, NoPathError) as error:
        raise Unservable(str(error), plan_rows(plan.decisions.values(), plan.evidence)) from error
    attestor = attestor_of(settings, subject, runner, plan)
    if settings.attestation_interval_s:
        progress("attesting", "a forward pass of each path under the profiler")

    def on_attested(num_done: int, num_batches: int) -> None:
        progress("attesting", f"{num_done} of {num_batches} forward passes")

    with blaming(runner.suspects):
        attested = attestor.attest_all("start", on_attested) if settings.attestation_interval_s else None
    refuse_unserved(dispatcher.plan.values(), plan, settings.on_unproven, attested)
    layers = _layers(settings, subject, runner, plan, progress)
    if dispatcher.timer is not None:
        dispatcher.timer.start()
    shadow = shadow_check_of(settings, subject, dispatcher, None if followers is None else followers.checked)
    ready = _ready(subject, plan, engine, runner, take_fallbacks(), longest_silence_s=longest_silence_s)
    drafting = drafting_of(settings)
    drafts = None if drafting is None else drafting.plan
    ready = msgspec.structs.replace(ready, layers=layers, drafts=drafts)
    if followers is not None:
        followers.send(Started())
        ready = msgspec.structs.replace(ready, has_peer_memory=followers.shares_memory)
    operator_quarantine = OperatorQuarantine(dispatcher, plan.evidence)
    replay = replay_of(settings, subject, runner, scheduler, shadow)
    return BuiltEngine(
        engine, runner, ready, attestor, attested, operator_quarantine, quarantine, shadow, replay, followers
    )


def _layers(settings: Settings, subject: Subject, runner: ModelRunner, plan: Plan, progress: Progress) -> LayersReport:
    """Hold the layers to the plain forward pass. Raises Unservable and LayersFailed, as the policy says."""

    def rows() -> list[PlanRow]:
        return plan_rows(runner.dispatcher.all_decisions, plan.evidence, subject.config.packing)

    try:
        with blaming(runner.suspects):
            found = check_layers(settings, subject, runner, progress)
    except (BatchError, NoPathError) as error:
        raise Unservable(str(error), rows()) from error
    refuse_failed(found, settings.on_unproven, rows)
    return found


def _load(
    settings: Settings,
    subject: Subject,
    dispatcher: Dispatcher,
    followers: Followers | None,
    progress: Progress,
    wait: Callable[[], None],
    *,
    measured: MeasuredProducts,
    fallbacks: MatmulFallbacks,
) -> Loaded:
    """Load the weights, choose how they are multiplied, and build the decoder, its draft head, and a tower.

    `wait`: for what is compiled ahead, before the first launch, on any rank.
    """
    progress("loading", str(subject.folder))
    ranks = ALONE
    if followers is not None:
        ranks = followers.begin(settings, dispatcher, identity_of(settings, subject))
        if followers.shares_memory:
            ranks = connected_ranks(subject, ranks)
    weights = load_weights(settings, subject, lambda detail: progress("loading", detail))
    wait()
    if followers is not None:
        followers.send(KernelsCompiled())
    if settings.choose_matmuls and subject.device.type == "cuda":
        progress("choosing", "algorithms of matmuls")
        in_order = settings.reproducible
        name = "products-in-order" if in_order else "products"
        file = own_file(cache_folder(settings), name, subject.fingerprint)
        run = measured.in_order if in_order else measured.by_time
        choose_products(weights, subject.config, subject.limits, file, subject.device, run, fallbacks)
        if followers is not None:
            followers.send(ChooseProducts(str(file.absolute())))
    decoder = decoder_of(subject, weights, dispatcher, ranks)
    head = head_of(subject, weights, dispatcher, decoder)
    tower = load_own_tower(settings, subject, dispatcher, lambda detail: progress("loading", detail))
    return Loaded(decoder, head, tower, dispatcher)


def _ready(
    subject: Subject,
    plan: Plan,
    engine: Engine,
    runner: ModelRunner,
    matmul_fallbacks: dict[MatmulFallback, int],
    *,
    longest_silence_s: float,
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
        plan=plan_rows(runner.dispatcher.all_decisions, plan.evidence, subject.config.packing),
        attention_layers=len(subject.main_config.attentions),
        num_compiles=num_compiles(),
        matmul_fallbacks=matmul_fallbacks,
        longest_silence_s=longest_silence_s,
        is_bound_by_cache=engine.max_len < subject.limits.max_model_len,
        has_grammars=runner.grammars is not None,
        paths={path.name: ServedPath(path.source_digest, path.order) for path in ALL_PATHS},
        max_image_tokens=subject.limits.max_image_tokens,
        states=state_slots(subject.config, subject.limits),
    )


def warm_engine(
    settings: Settings,
    subject: Subject,
    loaded: Loaded,
    followers: Followers | None,
    progress: Progress,
    take_fallbacks: Callable[[], dict[MatmulFallback, int]],
    new_capture: NewCapture,
) -> tuple[ModelRunner, Scheduler, Engine]:
    """Return an engine that has launched every kernel that it will, and whose graphs are captured by `new_capture`.

    Raises BatchError and NoPathError where a shape cannot run.
    """
    runner = _warm_runner(settings, subject, loaded, followers, progress, new_capture)
    scheduler = _scheduler(settings, subject, runner)
    return runner, scheduler, _engine(settings, subject, runner, scheduler, take_fallbacks, new_capture)


def _warm_runner(
    settings: Settings,
    subject: Subject,
    loaded: Loaded,
    followers: Followers | None,
    progress: Progress,
    new_capture: NewCapture,
) -> ModelRunner:
    """Return a runner with its whole cache, every planned kernel compiled and every graph captured.

    Raises BatchError where a shape cannot run.
    """
    tower, dispatcher = loaded.tower, loaded.dispatcher
    config, limits, device = subject.config, subject.limits, subject.device
    waits = not dispatcher.is_capturable
    if waits and device.type == "cuda" and settings.cuda_graphs:
        logger.warning("a path of experts, a recurrence or a convolution waits for the host: no CUDA graphs")
    is_capturable = device.type == "cuda" and not subject.pools and not waits
    has_graphs = settings.cuda_graphs and is_capturable
    sizes = sizes_of_graphs(config, limits, limits.max_model_len) if has_graphs else None
    num_rows = max(limits.max_num_seqs * (1 + limits.max_drafted_tokens), 0 if sizes is None else sizes.max_sampled)

    def worker(pages: int) -> Worker:
        return _new_worker(subject, loaded, followers, pages, num_rows)

    grammars = _grammars(subject, progress)
    own = worker(num_pages(settings, config, limits, device, sizes=sizes, small_runner=lambda: ModelRunner(worker(1))))
    runner = ModelRunner(own, grammars=grammars)
    with blaming(runner.suspects):
        warm_up(
            runner,
            dispatcher.plan,
            limits,
            is_cuda=device.type == "cuda",
            progress=lambda detail: progress("compiling" if device.type == "cuda" else "warming up", detail),
        )
        if tower is not None:
            warm_up_images(own, limits.tower_tokens(tower.config), is_cuda=device.type == "cuda")
    if sizes is None:
        return runner
    return ModelRunner(own, _capture_graphs(subject, own, progress, new_capture), grammars=grammars)


def _new_worker(subject: Subject, loaded: Loaded, followers: Followers | None, pages: int, num_rows: int) -> Worker:
    """Return a worker with a cache of so many pages, and places for the tokens of so many rows; it leads others."""
    config, limits, device, decoder = subject.config, subject.limits, subject.device, loaded.decoder
    slots = state_slots(config, limits)
    num_slots = 0 if slots is None else slots.num_slots
    made = partial(
        Worker,
        decoder,
        kv_cache_of(subject, pages),
        loaded.dispatcher,
        SampledTokens(num_rows, device),
        states=StateCache.allocate(config, num_slots, torch_dtype(limits.dtype), device),
        num_embeddings=limits.max_image_tokens,
        tower=loaded.tower,
        head=loaded.head,
        num_hidden=limits.max_num_batched_tokens,
    )
    if followers is None:
        return made()
    leading = made(rank=decoder.ranks, others=LedRanks(decoder.ranks, loaded.dispatcher, followers.send))
    followers.blamed = leading.suspects
    return leading


def _grammars(subject: Subject, progress: Progress) -> Grammars | None:
    """Return what binds answers to grammars; None for a tokenizer that cannot: requests with grammars are refused."""
    progress("loading", "the tokenizer for grammars")
    try:
        return Grammars.load(subject.folder, subject.config.vocab_size, subject.config.eos_token_ids)
    except ValueError as error:
        logger.warning("grammars cannot bind the answers of this model: %s", error)
        return None


def _capture_graphs(subject: Subject, worker: Worker, progress: Progress, new_capture: NewCapture) -> StepGraphs:
    """Capture every graph that sequences of these limits can reach."""
    limits, device, kv = subject.limits, worker.device, worker.kv
    max_context = min(limits.max_model_len, kv.num_pages * kv.page_size)
    graphs = StepGraphs(worker, sizes_of_graphs(subject.config, limits, max_context), max_context=max_context)
    torch.cuda.empty_cache()  # so that what is free now is free of what warm-up left behind
    started_at, free_before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    graphs.capture(new_capture(device), lambda detail: progress("capturing", detail))
    logger.info(
        "%d of %d graphs captured in %.1f s, %.0f MiB",
        len(graphs.keys),
        len(graphs.layouts),
        time.monotonic() - started_at,
        (free_before - torch.cuda.mem_get_info(device)[0]) / 2**20,
    )
    return graphs


def _fallbacks_of_all(own: MatmulFallbacks, followers: Followers) -> dict[MatmulFallback, int]:
    """Return and forget the fallbacks of this rank and those that the others have reported."""
    return dict(Counter(own.take()) + Counter(followers.take_fallbacks()))


def _scheduler(settings: Settings, subject: Subject, runner: ModelRunner) -> Scheduler:
    limits, states, drafting = subject.limits, runner.worker.states, drafting_of(settings)
    pool = PagePool(runner.num_pages, limits.page_size, None if states is None else StatePool(states.num_slots))
    return Scheduler(
        SchedulerLimits(
            limits.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_num_interleaved_tokens,
            limits.max_attended_keys,
            limits.max_drafted_tokens,
            max_embedded_tokens=limits.max_image_tokens,
            max_written_tokens=limits.max_num_batched_image_tokens or None,
            max_drafting_seqs=None if drafting is None else drafting.max_seqs,
            chunk=subject.config.chunk,
        ),
        pool,
        shares_pages=settings.prefix_caching,
        looks_ahead=drafting is not None and drafting.uses_head,
        seals=PageSeals(pool, DevicePageBytes(runner.worker.kv)),
    )


def _engine(
    settings: Settings,
    subject: Subject,
    runner: ModelRunner,
    scheduler: Scheduler,
    take_fallbacks: Callable[[], dict[MatmulFallback, int]],
    new_capture: NewCapture,
) -> Engine:
    config = subject.config
    drafting = drafting_of(settings)
    runs_ahead = settings.run_ahead and subject.device.type == "cuda"
    if not config.eos_token_ids and not subject.pools:
        logger.warning(
            "%s: no file names an end token (eos_token_id of config.json or generation_config.json, eos_token of "
            "tokenizer_config.json or special_tokens_map.json): each answer ends at max_tokens or at a request's stop",
            subject.folder,
        )
    takes = None
    if config.tower is not None:
        takes = EmbeddingFormat(
            config.hidden_size, config.has_three_positions, config.tower, sees_both_ways=config.has_image_spans
        )
    options = EngineOptions(config.vocab_size, config.eos_token_ids, settings.seed, runs_ahead, takes)
    return Engine(
        scheduler,
        runner,
        options,
        num_compiles=num_compiles,
        take_statistics=lambda: StepStatistics(
            *runner.dispatcher.take_samples(),
            take_fallbacks(),
            runner.worker.take_tower_times(),
            runner.worker.take_head_counts(),
        ),
        compile_grammar=None if runner.grammars is None else runner.grammars.compile,
        drafter=None if drafting is None else _drafter(drafting, subject, runner, scheduler, new_capture),
    )


def _warm_up_head(steps: HeadSteps, runner: ModelRunner, subject: Subject) -> None:
    """Have the draft head compute a prompt, a chunk, and what it drafts itself, so that each kernel is compiled."""
    size = subject.limits.page_size
    most = min(9, subject.limits.max_num_batched_tokens)  # the hidden states of no larger step are kept
    for query, context in ((1, 1), (most, most), (most, 12)) if subject.limits.max_model_len > 12 else ():
        batch = synthetic_batch([(query, context)], size)
        runner.launch(batch).result()
        [seq], [table] = batch.sequences, batch.page_tables
        steps.follow(batch, [HeadRow(seq, 0, 0, context - query, [0] * query, table, num_drafting=1)])
        steps.go_on([DraftedRow(seq, 0, context - 1, table)])
        steps.take([0, 1])
    runner.worker.take_head_counts()  # of no request


def _drafter(
    drafting: Drafting, subject: Subject, runner: ModelRunner, scheduler: Scheduler, new_capture: NewCapture
) -> Drafter | HeadDrafter:
    runner.max_drafted_tokens = drafting.num_speculative_tokens
    if not drafting.uses_head:
        return drafting.lookup_drafter(subject.limits.max_num_seqs)
    most = subject.limits.max_num_seqs if drafting.max_seqs is None else drafting.max_seqs
    row_tokens, steps = 1 + drafting.num_speculative_tokens, HeadSteps(runner)
    _warm_up_head(steps, runner, subject)
    if runner.graphs is not None and subject.shard.world == 1:
        max_context = min(subject.limits.max_model_len, runner.num_pages * subject.limits.page_size)
        rows = min(most, subject.limits.max_num_seqs)
        steps.capture(new_capture(subject.device, names_kernels=False), rows, max_context)
    return HeadDrafter(steps, scheduler.pool, most_rows=most, row_tokens=row_tokens)
