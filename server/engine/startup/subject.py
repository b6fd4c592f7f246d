"""Model and machine as a rank sees them before loading, and what it makes of them: decoder, cache, table."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.calls.batch import AttentionFlags
from kernels.catalog import PATHS
from kernels.collective.paths import collective_paths_on
from kernels.collective.shape import CollectiveShape
from kernels.convolution.shape import ConvolutionShape
from kernels.experts.shape import ExpertsShape
from kernels.linear.paths import linear_paths_on
from kernels.linear.shape import LinearShape
from kernels.recurrence.shape import RecurrenceShape
from kernels.system.device import num_cores, read_fingerprint, torch_dtype, use_all_cores
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Decision, Pairs, decisions_of
from qualification.decision.model_shapes import image_shapes, num_sums
from qualification.measure.start_plan import Redecide as RedecideAny
from qualification.model.cached_layers import skipping_fp8_cache
from qualification.model.config import ModelConfig
from qualification.model.draft_head import PRODUCT, draft_head_of, with_draft_head, without_draft_head
from qualification.model.families.image_models import without_image_spans
from qualification.model.families.quantization import has_plain_experts, rounded_at_load
from qualification.model.fields import ModelConfigError
from qualification.model.gated_delta import GatedDeltaConfig, with_drafted_tokens
from qualification.model.shard import TENSOR_PARALLEL_SIZES, Shard, shard_of
from qualification.model.short_convolution import ShortConvolutionConfig
from server.engine.execution.followers import RankIdentity
from server.engine.operators.attention_timer import AttentionTimer, CpuDevice, CudaDevice
from server.engine.operators.collective import CollectiveTable
from server.engine.operators.convolution import ConvolutionTable
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.linear import LinearTable, MeasuredProducts, with_measured
from server.engine.operators.recurrence import RecurrenceTable
from server.engine.operators.rows_table import RowsTable
from server.engine.operators.table import TableOptions
from server.engine.operators.tower import TowerTables
from server.engine.startup.drafting import drafting_of, rounds_draft_logits
from server.engine.startup.kv_sizing import check_sequences_fit, check_weights_fit
from server.engine.startup.limits import EngineLimits, choose_device, choose_dtype, choose_limits
from server.engine.startup.state_sizing import with_state_slots, with_states_of
from server.errors import ModelError, SettingsError
from server.model.decoder import Decoder, Operators, head_sizes
from server.model.draft_head import DraftHead
from server.model.images.settings import ImageSettings
from server.model.kv_cache import KVCache
from server.model.layers import Weights
from server.model.load.digests import DUMMY, known_weights_digest
from server.model.load.folder import check_folder
from server.model.load.load import check_checkpoint, has_draft_head, load_config, load_shard
from server.model.load.pooling import read_pooling
from server.model.load.rounded import rounded_copy
from server.model.ranks import ALONE, EarlyRows, Ranks
from server.model.vision.load import check_tower, has_known_tower, has_tower_tensors, load_tower, with_own_tower
from server.model.vision.tower import Pixels, Tower
from server.protocol.plan_rows import is_of_tower
from server.settings import LoadFormat, Quantization, Settings, Task

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """`model`: the whole one. `config`: what this rank computes of it, which is all of it where there is one rank.

    pools  whether its last token's vector is the answer: a graph gives none
    pixels  how the tower of `model` reads images; None where the server takes none
    reproducible  whether no row's bits may depend on the other rows of a batch
    """

    folder: Path
    model: ModelConfig
    shard: Shard
    limits: EngineLimits
    device: torch.device
    fingerprint: Fingerprint
    pools: bool = False
    reproducible: bool = False
    pixels: Pixels | None = None

    @property
    def config(self) -> ModelConfig:
        return self.shard.local_config

    @property
    def main_config(self) -> ModelConfig:
        """Return what this rank computes of answers: all of `config` but a draft head."""
        return without_draft_head(self.config)


def read_subject(settings: Settings, rank: int = 0) -> Subject:
    """Raises SettingsError and ModelError for what cannot be served, however often it is tried."""
    world = settings.tensor_parallel_size
    if world not in TENSOR_PARALLEL_SIZES:
        sizes = ", ".join(map(str, TENSOR_PARALLEL_SIZES))
        raise SettingsError(f"--tensor-parallel-size is {world}, it must be one of {sizes}")
    device = choose_device(settings, rank)
    if device.type == "cpu":
        _share_cores(world)
    else:
        torch.cuda.set_device(device)  # of this process: Triton and NCCL ask for the current one
    folder = Path(settings.model)
    check_folder(folder)
    model, pooling = load_config(folder), read_pooling(folder, settings)
    if pooling is not None and settings.speculative_config is not None:
        raise SettingsError(
            f"--speculative-config: a model of the task {pooling.task.value} drafts nothing; leave it out"
        )
    model = _skipping_fp8_cache(settings, with_states_of(settings, model))
    drafting = drafting_of(settings)
    if drafting is not None:
        model = with_drafted_tokens(model, drafting.num_speculative_tokens)
    if drafting is not None and drafting.uses_head:
        model = _with_draft_head(settings, folder, model, device)
    if settings.quantization is Quantization.FP8:
        model = _rounded(settings, folder, model)
    images = None if pooling is not None else _images_of(settings, folder)
    if images is not None:
        model = with_own_tower(folder, model)
    else:
        model = without_image_spans(model)
    if pooling is not None and pooling.task is Task.EMBED:
        model = replace(model, tie_embeddings=True)  # a head is not needed, and often not saved
    try:
        shard = shard_of(model, rank, world)
    except ModelConfigError as error:
        raise ModelError(f"{folder}: {error}") from error
    of_image = None if images is None else images.most_tokens
    limits = with_state_slots(settings, shard.local_config, choose_limits(settings, model, device, of_image), device)
    check_weights_fit(shard.local_config, limits, device)
    check_sequences_fit(model, limits, device)
    check_checkpoint(folder, model, settings.load_format)  # before attention is proven, which takes minutes
    if model.tower is not None and settings.load_format is not LoadFormat.DUMMY:
        check_tower(folder, model.tower)
    fingerprint = read_fingerprint(device)
    pixels = None if images is None else Pixels(images.mean, images.std, images.rescale_factor)
    return Subject(
        folder, model, shard, limits, device, fingerprint, pooling is not None, settings.reproducible, pixels
    )


def _rounded(settings: Settings, folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the model as it is loaded under --quantization fp8. Raises ModelError where it is quantised already."""
    try:
        model = rounded_at_load(model, with_experts=not settings.reproducible)
    except ModelConfigError as error:
        raise ModelError(f"{folder}: {error}") from error
    if has_plain_experts(model):
        of_path = "under --reproducible those of 16 have an order"
        reason = of_path if settings.reproducible else "they have biases"
        logger.warning("%s: --quantization fp8 leaves the experts in 16 bits: %s", folder, reason)
    return model


def _skipping_fp8_cache(settings: Settings, model: ModelConfig) -> ModelConfig:
    """Return the model with the layers that the settings keep out of an fp8 cache. Raises SettingsError."""
    if settings.kv_cache_dtype_skip_layers is None:
        return model
    try:
        return skipping_fp8_cache(model, [it.strip() for it in settings.kv_cache_dtype_skip_layers.split(",")])
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _with_draft_head(settings: Settings, folder: Path, model: ModelConfig, device: torch.device) -> ModelConfig:
    """Return the model with its draft head. Raises SettingsError where it, or the checkpoint, has none."""
    try:
        found = with_draft_head(model)
    except ModelConfigError as error:
        raise SettingsError(
            f"tokens drafted by the model's own head (mtp) are asked for: {error}; use ngram"
        ) from error
    if settings.load_format is not LoadFormat.DUMMY and not has_draft_head(folder, model):
        raise SettingsError(
            f"tokens drafted by the model's own head (mtp) are asked for, and {folder} has no tensor {PRODUCT}: fetch "
            "a checkpoint that has its head, or use ngram"
        )
    dtype = choose_dtype(settings.dtype, model, device.type)
    return replace(found, rounds_draft_logits=rounds_draft_logits(settings, found, dtype, device))


def _images_of(settings: Settings, folder: Path) -> ImageSettings | None:
    """Return the model's processor of images; None where the server takes none. Raises ModelError."""
    if settings.limit_images == 0 or not has_known_tower(folder):
        return None
    is_there = settings.load_format is LoadFormat.DUMMY or has_tower_tensors(folder)
    try:
        found = ImageSettings.load(folder) if is_there else None
    except ModelError as error:
        logger.warning("images are refused, and text alone is served: %s", error.message)
        return None
    if found is None:
        logger.warning("%s: images are refused, and text alone is served: it has no tensors of a tower", folder)
        return None
    return found


def load_own_tower(
    settings: Settings, subject: Subject, dispatcher: Dispatcher, say: Say = lambda _: None
) -> Tower | None:
    """Load the tower, which each rank has whole; None where the server takes no images. Raises ModelError."""
    config = subject.model.tower
    if config is None or subject.pixels is None:
        return None
    weights = load_tower(
        subject.folder,
        config,
        dtype=torch_dtype(subject.limits.dtype),
        device=subject.device,
        load_format=settings.load_format,
        progress=say,
    )
    tables, reproducible = dispatcher.tower, subject.reproducible
    tower = Tower(config, weights, subject.pixels, is_reproducible=reproducible, operators=tables)
    if subject.device.type == "cuda" and tables is not None:
        tables.linear.warm_up()
    return tower


def identity_of(settings: Settings, subject: Subject) -> RankIdentity:
    """Return what must be the same on all ranks."""
    has_weights = settings.load_format is not LoadFormat.DUMMY
    weights = known_weights_digest(subject.folder) if has_weights else DUMMY
    return RankIdentity(subject.fingerprint.values(), weights)


def connected_ranks(subject: Subject, ranks: Ranks) -> Ranks:
    """Return ranks that write into each other's memory, where their GPUs can.

    Raises PeerMemoryError on all ranks where CUDA lets their processes share none.
    """
    sizes = head_sizes(subject.model.vocab_size, ranks.world)
    return ranks.connected(subject.model.hidden_size, torch_dtype(subject.limits.dtype), sizes, subject.device)


def load_weights(settings: Settings, subject: Subject, say: Say = lambda _: None) -> Weights:
    """Load this rank's part of the model. Only its bytes of the checkpoint are read."""
    return load_shard(
        subject.folder,
        subject.model,
        subject.shard,
        dtype=torch_dtype(subject.limits.dtype),
        device=subject.device,
        load_format=settings.load_format,
        progress=say,
    )


def decoder_of(subject: Subject, weights: Weights, dispatcher: Dispatcher, ranks: Ranks = ALONE) -> Decoder:
    """Build the decoder, once, of all that computes it, and give the table of attention the weights' sinks."""
    if dispatcher.collective is not None:
        ranks = replace(ranks, run=dispatcher.collective.run)
    for flags, index in zip(dispatcher.flags, subject.main_config.attention_layers, strict=True):
        layer = weights.layers[index]
        if flags.sinks is not None and layer.sinks is not None:
            flags.sinks.copy_(layer.sinks)
    early = early_rows(dispatcher, ranks)
    operators = replace(operators_of(dispatcher, early), is_reproducible=subject.reproducible)
    main = _served(subject.main_config, subject.limits)
    decoder = Decoder(main, replace(weights, layers=weights.layers[: main.num_layers]), ranks, operators)
    if subject.device.type == "cuda" and dispatcher.linear is not None:
        dispatcher.linear.warm_up()
    return decoder


def head_of(subject: Subject, weights: Weights, dispatcher: Dispatcher, decoder: Decoder) -> DraftHead | None:
    """Build the draft head beside its decoder, of the same tables; None for a model without."""
    if weights.draft is None:
        return None
    early = early_rows(dispatcher, decoder.ranks)
    operators = replace(operators_of(dispatcher), is_reproducible=subject.reproducible)
    if dispatcher.linear is not None:
        operators = replace(operators, product=partial(dispatcher.linear.product, is_of_head=True, early=early))
    if dispatcher.experts is not None:
        operators = replace(operators, experts=partial(dispatcher.experts.products_of, is_of_head=True))
    if subject.config.rounds_draft_logits:
        weights = replace(weights, head=rounded_copy(weights.head))
    head = DraftHead(decoder, _served(subject.config, subject.limits), weights, operators)
    if subject.device.type == "cuda" and dispatcher.linear is not None:
        dispatcher.linear.warm_up()
    return head


def early_rows(dispatcher: Dispatcher, ranks: Ranks) -> EarlyRows | None:
    """Return what sends rows of a product ahead of their sum over the ranks; None where nothing does."""
    if dispatcher.collective is None or ranks.boxes is None:
        return None
    return EarlyRows(ranks.boxes, dispatcher.collective.is_exchanged)


def operators_of(dispatcher: Dispatcher, early: EarlyRows | None = None) -> Operators:
    """Return what computes the products of a decoder by these tables; where there is none, as without a plan."""
    linear, experts, recurrence = dispatcher.linear, dispatcher.experts, dispatcher.recurrence
    operators = Operators() if linear is None else Operators(partial(linear.product, early=early))
    if experts is not None:
        operators = replace(operators, experts=experts.products_of, expert_borders=experts.borders)
    if dispatcher.convolution is not None:
        operators = replace(operators, convolution=dispatcher.convolution.run_of)
    return operators if recurrence is None else replace(operators, gated_delta=recurrence.run_of)


def kv_cache_of(subject: Subject, num_pages: int) -> KVCache:
    """Allocate the pages of this rank's KV heads."""
    limits = subject.limits
    dtype, kv_dtype = torch_dtype(limits.dtype), torch_dtype(limits.kv_dtype)
    return KVCache.allocate(subject.config, num_pages, limits.page_size, kv_dtype, subject.device, model_dtype=dtype)


def dispatcher_of(
    subject: Subject,
    decisions: Mapping[AnyShape, Decision[AnyShape]],
    measured: MeasuredProducts,
    *,
    redecide: RedecideAny,
    quarantined: Pairs = frozenset(),
    overridden: Pairs = frozenset(),
    has_timer: bool = True,
) -> Dispatcher:
    """Return the tables of these decisions for the model's layers; `decoder_of` fills its sinks.

    `measured`: what multiplies by the algorithms that are measured once the weights are there.
    """
    config, device = subject.main_config, subject.device
    flags = tuple(
        AttentionFlags(
            it.scale,
            window=it.window,
            softcap=it.softcap,
            sinks=torch.zeros(it.num_heads, device=device) if it.has_sinks else None,
        )
        for it in config.attentions
    )
    # A launch that fails on one of several ranks leaves the others in the middle of a step.
    is_alone = subject.shard.world == 1
    options = TableOptions[Any](redecide=redecide, quarantined=quarantined, overridden=overridden, may_replace=is_alone)
    heads = tuple(map(Heads.of, config.attentions))
    of_device = CudaDevice() if device.type == "cuda" else CpuDevice()
    timer = AttentionTimer(flags, of_device, heads=heads, chunks=config.chunks) if has_timer else None
    of_attention = decisions_of(AttentionShape, decisions)
    attention = {shape: decision for shape, decision in of_attention.items() if not is_of_tower(shape)}
    return Dispatcher(
        attention,
        PATHS,
        flags,
        redecide=redecide,
        timer=timer,
        tables=_tables_of(subject, decisions, measured, options),
        layers=config.attention_layers,
        heads=heads,
        chunks=config.chunks,
        quarantined=quarantined,
        overridden=overridden,
        tower=_tower_tables(subject, decisions, options),
    )


def _tables_of(
    subject: Subject,
    decisions: Mapping[AnyShape, Decision[AnyShape]],
    measured: MeasuredProducts,
    options: TableOptions[Any],
) -> list[RowsTable[Any, Any]]:
    """Return the tables of the operators that a text's layers have beside attention."""
    config, device, dtype = subject.main_config, subject.device, subject.limits.dtype
    products = with_measured(linear_paths_on(device), measured)
    tables: list[RowsTable[Any, Any]] = [LinearTable(decisions_of(LinearShape, decisions), products, **options)]
    if config.has_mixtures:
        tables.append(ExpertsTable(config, dtype, decisions_of(ExpertsShape, decisions), **options))
    if any(isinstance(it, GatedDeltaConfig) for it in config.recurrences):
        tables.append(RecurrenceTable(config, dtype, decisions_of(RecurrenceShape, decisions), **options))
    if any(isinstance(it, ShortConvolutionConfig) for it in config.recurrences):
        tables.append(ConvolutionTable(config, dtype, decisions_of(ConvolutionShape, decisions), **options))
    if subject.shard.world > 1:
        of_sums = decisions_of(CollectiveShape, decisions)
        paths = collective_paths_on(device)
        of_head = num_sums(draft_head_of(subject.config)) if subject.config.num_draft_layers else {}
        tables.append(CollectiveTable(num_sums(config), of_sums, paths, num_of_head=of_head, **options))
    return tables


def _tower_tables(
    subject: Subject, decisions: Mapping[AnyShape, Decision[AnyShape]], options: TableOptions[Any]
) -> TowerTables | None:
    """Return the tables of a tower; None where no images are served."""
    if subject.pixels is None or subject.model.tower is None:
        return None
    of_tower = image_shapes(subject.model, subject.limits.serving)
    # The library's products as they were qualified: its algorithms are measured for the text's weights alone.
    products = linear_paths_on(subject.device)
    return TowerTables(subject.model.tower, decisions, PATHS, products, shapes=of_tower, **options)


def _served(config: ModelConfig, limits: EngineLimits) -> ModelConfig:
    """LongRoPE's factors are those of the context served."""
    return replace(config, max_position=limits.max_model_len)


def _share_cores(world: int) -> None:
    if world == 1:
        use_all_cores()
    else:
        torch.set_num_threads(max(1, num_cores() // world))
