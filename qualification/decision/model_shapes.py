"""Attention signature of a model, and every shape of every operator that serving it can meet."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernels.collective.shape import CollectiveShape, Follows
from kernels.convolution.shape import ConvolutionShape
from kernels.experts.shape import ExpertsShape
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.buckets import Bucket, buckets_up_to
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Values, with_values
from qualification.decision.linear_shapes import linear_shapes_needed
from qualification.decision.tower_shapes import tower_shapes_needed
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.shard import local_heads, sums_at_norms
from qualification.model.short_convolution import ShortConvolutionConfig


@dataclass(frozen=True, slots=True)
class AttentionSignature:
    """The attention of all layers of a model that have the same heads: two of one signature need the same proofs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)  # distinct; None (no window) first, then ascending
    softcap: float | None = None
    sinks: bool = False
    spans: bool = False  # prompts may hold images, whose tokens see each other both ways
    skips_fp8_cache: bool = False  # a cache of 8 bits holds these layers' keys and values in the model's dtype
    values: Values | None = None  # where they have another size than the keys

    def __str__(self) -> str:
        """One word, usable as a file name and unique for every signature."""
        parts = [f"h{self.num_heads}-{self.num_kv_heads}", f"d{self.head_dim}"]
        if self.windows != (None,):
            parts.append("w" + "-".join("full" if window is None else str(window) for window in self.windows))
        if self.softcap is not None:
            parts.append(f"cap{self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.spans:
            parts.append("spans")
        if self.skips_fp8_cache:
            parts.append("kv16")
        if self.values is not None:
            parts.append(str(self.values).replace("-", ""))
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The settings that bound what a batch can look like."""

    max_model_len: int  # tokens of prompt and completion
    max_num_batched_tokens: int  # new tokens of one step
    page_size: int  # tokens
    dtype: Dtype
    kv_dtype: Dtype
    max_drafted_tokens: int = 0  # of a sequence, that one step verifies; 0: no tokens are drafted
    max_num_seqs: int | None = None  # sequences that run at once; None: as many as a step has tokens
    max_image_tokens: int = 0  # of the images that a tower computes together; 0: it computes none


def distinct_windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The windows of all layers, each once, in the order that `AttentionSignature` keeps."""
    found = set(windows)
    full: tuple[int | None, ...] = (None,) if None in found else ()
    return full + tuple(sorted(window for window in found if window is not None))


def shapes_needed(signature: AttentionSignature, limits: ServingLimits) -> tuple[AttentionShape, ...]:
    """Every shape that a batch can have under these limits: prefill, extend, decode; verify where tokens are drafted.

    A query is at most min(max_model_len, max_num_batched_tokens) long, and no longer than its context, which is at
    most max_model_len long. The longest query and the longest context of a batch may be different sequences'. Where
    prompts may hold images, each shape of prefill and extend is needed with and without them; tokens that are decoded
    are text.
    """
    query_buckets = buckets_up_to(min(limits.max_model_len, limits.max_num_batched_tokens))
    context_buckets = buckets_up_to(limits.max_model_len)
    layouts: list[tuple[Phase, Bucket, Bucket]] = [(Phase.PREFILL, bucket, bucket) for bucket in query_buckets]
    layouts += [
        (Phase.EXTEND, query, context)
        for query in query_buckets
        for context in context_buckets
        if context.lo >= query.lo
    ]
    is_skipped = signature.skips_fp8_cache and limits.kv_dtype is FP8
    kv_dtype = limits.dtype if is_skipped else limits.kv_dtype
    single = (Phase.DECODE, Phase.VERIFY) if limits.max_drafted_tokens else (Phase.DECODE,)
    layouts += [(phase, Bucket.LE_128, context) for phase in single for context in context_buckets]
    found = (
        AttentionShape(
            phase=phase,
            dtype=limits.dtype,
            # A fresh prompt's keys and values are read beside the pages, in the model's dtype.
            kv_dtype=limits.dtype if phase is Phase.PREFILL else kv_dtype,
            num_heads=signature.num_heads,
            num_kv_heads=signature.num_kv_heads,
            head_dim=signature.head_dim,
            query_bucket=query,
            context_bucket=context,
            page_size=None if phase is Phase.PREFILL else limits.page_size,
            window=window,
            softcap=signature.softcap,
            sinks=signature.sinks,
            mask=mask,
        )
        for mask in (Mask.CAUSAL, *((Mask.SPANS,) if signature.spans else ()))
        for window in signature.windows
        for phase, query, context in layouts
        if mask is Mask.CAUSAL or phase not in single
    )
    return tuple(with_values(it, signature.values) for it in found)


def plan_shapes(
    model: ModelConfig, limits: ServingLimits, device_type: str, num_ranks: int = 1
) -> tuple[AnyShape, ...]:
    """Every shape of every operator that a server of this model can meet.

    num_ranks  with which it is computed; `model` is then the part of the first of them
    """
    products = linear_shapes_needed(model, limits.dtype, limits.max_num_batched_tokens, device_type, num_ranks)
    sums = collective_shapes_needed(model, limits, num_ranks)
    of_text: tuple[AnyShape, ...] = (
        *attention_shapes_needed(model, limits),
        *products,
        *experts_shapes_needed(model, limits),
        *sums,
        *recurrence_shapes_needed(model, limits),
        *convolution_shapes_needed(model, limits),
    )
    return tuple(dict.fromkeys((*of_text, *image_shapes(model, limits))))


def image_shapes(model: ModelConfig, limits: ServingLimits) -> tuple[AnyShape, ...]:
    """Every shape of the model's tower; none where a server takes no images."""
    return () if model.tower is None else tower_shapes_needed(model.tower, limits.dtype, limits.max_image_tokens)


def attention_shapes_needed(model: ModelConfig, limits: ServingLimits) -> tuple[AttentionShape, ...]:
    """Every shape of a model's attention, or of one rank's part of it, whatever its layers' heads."""
    # Each once: layers kept out of a cache of 8 bits have the prompts' shapes of the others.
    found = (shape for signature in signatures_of(model) for shape in shapes_needed(signature, limits))
    return tuple(dict.fromkeys(found))


def num_sums(model: ModelConfig) -> dict[Follows, int]:
    """Return the sums over the ranks of one step: of every mixer and feed-forward, two where its parts are normed."""
    fed = [layer.feed_forward for layer in model.layers]
    count = sum(layer.num_sublayers for layer in model.layers)
    count += sum(isinstance(it, ExpertsConfig) and it.norms_apart for it in fed)
    if not sums_at_norms(model):
        return {Follows.NOTHING: count}
    return {Follows.ADD_NORM: count - 1, Follows.NOTHING: 1}  # a norm has the sum before it; the last one has none


def collective_shapes_needed(model: ModelConfig, limits: ServingLimits, num_ranks: int) -> tuple[CollectiveShape, ...]:
    """Every shape of the sums over the ranks, one for each bucket of the tokens of a step."""
    if num_ranks == 1:
        return ()
    buckets = TokenRows.up_to(limits.max_num_batched_tokens)
    return tuple(
        CollectiveShape(limits.dtype, model.hidden_size, num_ranks, follows, rows)
        for follows in num_sums(model)
        for rows in buckets
    )


def experts_shapes_needed(model: ModelConfig, limits: ServingLimits) -> tuple[ExpertsShape, ...]:
    """Every shape of the model's mixtures, one for each bucket of the tokens of a step."""
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsConfig)]
    shapes = (
        experts_shape(mixture, model.hidden_size, limits.dtype, rows)
        for mixture in dict.fromkeys(mixtures)
        for rows in TokenRows.up_to(limits.max_num_batched_tokens)
    )
    return tuple(dict.fromkeys(shapes))


def recurrence_shapes_needed(model: ModelConfig, limits: ServingLimits) -> tuple[RecurrenceShape, ...]:
    """Every shape of the model's gated delta rules: each phase for the tokens that a step of it may have."""
    mixers = dict.fromkeys(it for it in model.recurrences if isinstance(it, GatedDeltaConfig))
    shapes = (
        recurrence_shape(mixer, phase, limits.dtype, rows)
        for mixer in mixers
        for phase, rows in _rows_of_states(limits)
    )
    return tuple(dict.fromkeys(shapes))


def convolution_shapes_needed(model: ModelConfig, limits: ServingLimits) -> tuple[ConvolutionShape, ...]:
    """Every shape of the model's short convolutions, as of its gated delta rules."""
    sizes = dict.fromkeys(it.sizes for it in model.recurrences if isinstance(it, ShortConvolutionConfig))
    return tuple(
        ConvolutionShape.of(it, phase, limits.dtype, rows) for it in sizes for phase, rows in _rows_of_states(limits)
    )


def _rows_of_states(limits: ServingLimits) -> list[tuple[Phase, TokenRows]]:
    """Return the phases of layers with a state, each with the tokens that a step of it may have."""
    most, drafted = limits.max_num_batched_tokens, limits.max_drafted_tokens
    num_seqs = most if limits.max_num_seqs is None else limits.max_num_seqs
    tokens = {Phase.EXTEND: most, Phase.DECODE: min(most, num_seqs)}
    if drafted:
        tokens[Phase.VERIFY] = min(most, num_seqs * (1 + drafted))
    return [(phase, rows) for phase, num_tokens in tokens.items() for rows in TokenRows.up_to(num_tokens)]


def recurrence_shape(mixer: GatedDeltaConfig, phase: Phase, dtype: Dtype, rows: TokenRows) -> RecurrenceShape:
    """The shape of a layer's recurrence for so many tokens."""
    return RecurrenceShape.of(mixer.sizes, phase, dtype, mixer.state_dtype, rows, mixer.form)


def experts_shape(mixture: ExpertsConfig, hidden_size: int, dtype: Dtype, rows: TokenRows) -> ExpertsShape:
    """The shape of a mixture's products for so many tokens."""
    return ExpertsShape(
        dtype=dtype,
        format=mixture.format,
        num_experts=mixture.num_experts_computed,
        num_active=mixture.num_active_computed,
        hidden=mixture.read_size(hidden_size),
        width=mixture.width,
        activation=mixture.activation,
        has_bias=mixture.has_bias,
        rows=rows,
    )


def signature_of(model: ModelConfig, tensor_parallel_size: int = 1) -> AttentionSignature:
    """Return the signature of a model, whose layers that attend differ in nothing of attention but their windows.

    Raises as `signatures_of`, and ValueError for a model with several.
    """
    found, *others = signatures_of(model, tensor_parallel_size)
    if others:
        raise ValueError(f"{model.family}: layers have {1 + len(others)} kinds of heads, each with a signature")
    return found


def signatures_of(model: ModelConfig, tensor_parallel_size: int = 1) -> tuple[AttentionSignature, ...]:
    """Return the signature of each kind of heads among a model's layers, the first layer's first.

    With several ranks it is that of each rank's heads, which are as many on all of them. Raises ModelConfigError where
    the heads cannot be split among so many.
    """
    windows: dict[AttentionSignature, list[int | None]] = {}
    for attention in model.attentions:
        heads = local_heads(attention, 0, tensor_parallel_size)
        kind = AttentionSignature(
            num_heads=len(heads.query),
            num_kv_heads=len(heads.kv),
            head_dim=attention.head_dim,
            softcap=attention.softcap,
            sinks=attention.has_sinks,
            spans=attention.sees_spans,
            skips_fp8_cache=attention.skips_fp8_cache,
            values=attention.values,
        )
        windows.setdefault(kind, []).append(attention.window)
    return tuple(replace(kind, windows=distinct_windows(found)) for kind, found in windows.items())
