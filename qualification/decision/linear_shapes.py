"""Every product with a weight that serving a model can need, by its linear shape."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.fused.activation_kind import Activation
from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import FP8_ROWS, PLAIN, LinearShape, WeightFormat
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    LayerConfig,
    LinearFormats,
    Mixer,
    ModelConfig,
    num_inner_of,
)
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.latent import LatentAttentionConfig
from qualification.model.shard import vocabulary_rows
from qualification.model.short_convolution import ShortConvolutionConfig

MAX_LOGITS = 2**25  # numbers of the logits that prompts are scored by at once
_MOST_SAMPLED = 512  # rows of a step whose next token is chosen


@dataclass(frozen=True, slots=True)
class _Weight:
    """A product of the model, whatever the number of rows."""

    size_in: int
    size_out: int
    has_bias: bool = False
    epilogue: Epilogue = Epilogue.NONE
    dtype: Dtype | None = None  # None: that of the model
    format: WeightFormat = PLAIN


def linear_shapes_needed(
    model: ModelConfig, dtype: Dtype, max_num_batched_tokens: int, device_type: str, num_ranks: int = 1
) -> tuple[LinearShape, ...]:
    """Every shape of a model, or of one rank's part of it, in the order in which a forward pass needs the weights.

    The product of one column that gates what all tokens visit is not among them: it is a small kernel of its own, or
    the router's.
    """
    weights = dict.fromkeys(
        weight for layer in model.layers for weight in _weights_of(layer, model, dtype, device_type)
    )
    weights |= dict.fromkeys(_per_layer_weights(model))
    if model.num_draft_layers:
        weights[_Weight(2 * model.hidden_size, model.hidden_size)] = None
    found = [_shape(weight, dtype, rows) for weight in weights for rows in LinearRows.up_to(max_num_batched_tokens)]
    for size in sorted({len(vocabulary_rows(model.vocab_size, rank, num_ranks)) for rank in range(num_ranks)}):
        most = min(max_num_batched_tokens, max(_MOST_SAMPLED, MAX_LOGITS // size))
        in_fp32 = _stored_in_fp32(dtype, device_type)
        head = _Weight(model.hidden_size, size, epilogue=in_fp32, format=model.head_format)
        found += [_shape(head, dtype, rows) for rows in LinearRows.up_to(most)]
        if model.rounds_draft_logits:
            drafts, of_drafts = replace(head, format=FP8_ROWS), min(max_num_batched_tokens, _MOST_SAMPLED)
            found += [_shape(drafts, dtype, rows) for rows in LinearRows.up_to(of_drafts)]
    return tuple(dict.fromkeys(found))


def _shape(weight: _Weight, dtype: Dtype, rows: LinearRows) -> LinearShape:
    sizes = weight.size_in, weight.size_out
    return LinearShape(weight.dtype or dtype, *sizes, rows, weight.has_bias, weight.epilogue, weight.format)


def _weights_of(layer: LayerConfig, model: ModelConfig, dtype: Dtype, device_type: str) -> Iterator[_Weight]:
    yield from _own_weights_of(layer, model.hidden_size)
    mixer = layer.mixer
    if isinstance(mixer, LatentAttentionConfig) and (own := mixer.own_indexer) is not None:
        yield _Weight(mixer.sizes.query_latent or 0, own.num_heads * own.dim, format=layer.formats.index_up)
        yield _Weight(model.hidden_size, own.dim, format=layer.formats.index_key)
        yield _router(model.hidden_size, own.num_heads, dtype, device_type)
    if isinstance(layer.feed_forward, ExpertsConfig):
        yield _router(model.hidden_size, layer.feed_forward.router_rows, dtype, device_type)


def _per_layer_weights(model: ModelConfig) -> Iterator[_Weight]:
    """The products of embeddings for each layer: one of the model, and two of each layer."""
    if model.per_layer is not None:
        yield _Weight(model.hidden_size, model.num_layers * model.per_layer.width)
        yield _Weight(model.hidden_size, model.per_layer.width)
        yield _Weight(model.per_layer.width, model.hidden_size)


def _own_weights_of(layer: LayerConfig, hidden: int) -> Iterator[_Weight]:
    formats = layer.formats
    for mixer in layer.mixers:
        yield from _weights_of_mixer(mixer, formats, hidden)
    fed = layer.feed_forward
    match fed:
        case DenseConfig(width, activation, has_bias) if fed.num_inner == 1:
            yield _Weight(hidden, width, has_bias, format=formats.gate_up)
            yield _Weight(width, hidden, has_bias, format=formats.down)
        case DenseConfig(width, activation, has_bias):
            is_swiglu = activation is Activation.SILU and not has_bias and fed.gate_scale == 1
            yield from _dense(hidden, width, formats, is_swiglu=is_swiglu, has_bias=has_bias)
        case ExpertsConfig():
            if fed.latent is not None:
                yield _Weight(hidden, fed.latent, format=formats.to_latent)
                yield _Weight(fed.latent, hidden, format=formats.from_latent)
            if fed.shared is None or fed.shared_is_expert:
                return
            if num_inner_of(fed.shared_activation) == 1:
                yield _Weight(hidden, fed.shared.width, format=formats.gate_up)
                yield _Weight(fed.shared.width, hidden, format=formats.down)
            else:
                is_swiglu = fed.shared_activation is Activation.SILU
                yield from _dense(hidden, fed.shared.width, formats, is_swiglu=is_swiglu, has_bias=False)


def _weights_of_mixer(mixer: Mixer, formats: LinearFormats, hidden: int) -> Iterator[_Weight]:
    if isinstance(mixer, AttentionConfig):
        yield _Weight(hidden, mixer.projected_size, mixer.has_bias, format=formats.qkv)
        if mixer.gate is not None and not mixer.gate.is_beside_queries:
            yield _Weight(hidden, mixer.gate_size)
        if isinstance(mixer, LatentAttentionConfig) and mixer.sizes.query_latent is not None:
            yield _Weight(mixer.sizes.query_latent, mixer.num_heads * mixer.sizes.query, format=formats.query_up)
        yield _Weight(mixer.output_size, hidden, mixer.has_output_bias, format=formats.output)
    elif isinstance(mixer, GatedDeltaConfig):
        first, gates = mixer.input_rows(formats)
        yield _Weight(hidden, first, format=formats.qkv)
        if gates:
            yield _Weight(hidden, gates, format=formats.gates)
        if mixer.has_channel_decays:
            yield _Weight(mixer.sizes.value_dim, mixer.num_decays)
            yield _Weight(mixer.sizes.value_dim, mixer.value_size)
        yield _Weight(mixer.value_size, hidden, format=formats.output)
    elif isinstance(mixer, ShortConvolutionConfig):
        yield _Weight(hidden, 3 * mixer.sizes.channels, mixer.sizes.has_bias, format=formats.qkv)
        yield _Weight(mixer.sizes.channels, hidden, mixer.sizes.has_bias, format=formats.output)


def _dense(hidden: int, width: int, formats: LinearFormats, *, is_swiglu: bool, has_bias: bool) -> Iterator[_Weight]:
    if is_swiglu:
        yield _Weight(hidden, width, epilogue=Epilogue.SWIGLU, format=formats.gate_up)
    else:
        yield _Weight(hidden, 2 * width, has_bias, format=formats.gate_up)
    yield _Weight(width, hidden, has_bias, format=formats.down)


def _router(hidden: int, num_rows: int, dtype: Dtype, device_type: str) -> _Weight:
    """The router's bias, where there is one, is added behind the product; a CPU widens the operands before it."""
    if device_type == "cpu":
        return _Weight(hidden, num_rows, dtype=Dtype.FP32)
    return _Weight(hidden, num_rows, epilogue=_stored_in_fp32(dtype, device_type))


def _stored_in_fp32(dtype: Dtype, device_type: str) -> Epilogue:
    """A CPU rounds logits to the dtype of the model and widens them, which is no part of the product."""
    return Epilogue.NONE if dtype is Dtype.FP32 or device_type == "cpu" else Epilogue.FP32
