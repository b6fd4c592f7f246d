"""Fields of config.json that every family writes alike. A field that a family leaves out is as in Llama."""

import math
from collections.abc import Callable, Container
from dataclasses import replace

from kernels.fused.activation_kind import Activation
from kernels.fused.ungated_kind import Ungated
from qualification.model.config import (
    AttentionConfig,
    AttentionGate,
    DenseConfig,
    EagerActivation,
    FeedForward,
    LayerConfig,
    ModelConfig,
    NormsConfig,
    QKNorm,
    QueryScaling,
    RopeConfig,
    RopeKind,
)
from qualification.model.fields import Fields
from qualification.model.rope import THETA, read_rope
from qualification.model.windows import Windows, no_windows, read_num_layers

_ALIASES = {"swish": Activation.SILU}  # other names in transformers
_EAGER_ACTIVATIONS = {
    "gelu_pytorch_tanh": EagerActivation.GELU_TANH,
    "gelu_new": EagerActivation.GELU_TANH,  # the same, of other implementations
    "gelu_fast": EagerActivation.GELU_TANH,
    "gelu": EagerActivation.GELU,
    "relu": EagerActivation.RELU,
}


def read_like_llama(
    fields: Fields,
    family: str,
    *,
    norm_eps: float = 1e-6,
    norms: NormsConfig | None = None,
    qk_norm: QKNorm = QKNorm.NONE,
    windows: Callable[[Fields], Windows] = no_windows,
    rope: Callable[[Fields, int], RopeConfig] | None = None,
    local_rope: Callable[[Fields, int], RopeConfig] | None = None,
    scale: Callable[[Fields, int], float] | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    attention_bias: bool = False,
    output_bias: bool = False,
    feed_forward: Callable[[Fields], FeedForward] | None = None,
    feed_forwards: Callable[[Fields], tuple[FeedForward | None, ...]] | None = None,
    heads: str | None = None,
    gate: AttentionGate | None = None,
    tie_embeddings: bool = False,
) -> ModelConfig:
    """Read one model, whose layers differ in nothing but windows, feed-forward and heads. Raises ModelConfigError.

    norm_eps, tie_embeddings  where the field is missing, as the family's class in transformers has it
    rope, local_rope          of fields and head_dim: the rotation, and that of layers with a window if it is another
    feed_forwards             one a layer, in place of one for all
    heads                     a field with the query heads of each layer, which may be missing
    scale                     of fields and head_dim: the factor of the scores; 1 / sqrt(head_dim) by default
    """
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    num_heads_of = (num_heads,) * read_num_layers(fields)
    if heads is not None:
        num_heads_of = fields.integers(heads, len(num_heads_of), num_heads)
        if any(it % num_kv_heads for it in num_heads_of):
            fields.refuse(heads, f"multiples of num_key_value_heads ({num_kv_heads})")
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_position = fields.integer("max_position_embeddings")
    ropes = {False: (rope or plain_ropes)(fields, head_dim)}
    ropes[True] = ropes[False] if local_rope is None else local_rope(fields, head_dim)
    longest = min(it.longest_context(max_position) for it in ropes.values())
    layer_windows = windows(fields)
    fed: tuple[FeedForward | None, ...]
    if feed_forwards is None:
        fed = ((feed_forward or read_dense)(fields),) * len(layer_windows)
    else:
        fed = feed_forwards(fields)

    def layer(window: int | None, fed: FeedForward | None, num_heads: int) -> LayerConfig:
        attention = AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0 / math.sqrt(head_dim) if scale is None else scale(fields, head_dim),
            rope=ropes[window is not None],
            window=None if window is None or window >= longest else window,  # it hides nothing
            softcap=softcap,
            has_sinks=has_sinks,
            qk_norm=qk_norm,
            has_bias=attention_bias,
            has_output_bias=output_bias,
            gate=gate,
        )
        return LayerConfig(attention, norms or NormsConfig(), fed)

    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(map(layer, layer_windows, fed, num_heads_of)),
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_embeddings),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        dtype=_dtype(fields),
    )


def check_head_size(fields: Fields, model: ModelConfig) -> None:
    """Refuse a head_dim that the family's class does not read. Raises ModelConfigError."""
    num_heads, head_dim = model.attentions[0].num_heads, model.attentions[0].head_dim
    if head_dim * num_heads != model.hidden_size:
        fields.refuse("head_dim", f"absent or hidden_size / num_attention_heads ({model.hidden_size} / {num_heads})")


def without_rotation(model: ModelConfig, layers: Container[int]) -> ModelConfig:
    """Return the model with some layers, by their places, that see no positions: nothing is rotated in them."""

    def changed(layer: LayerConfig) -> LayerConfig:
        rope = RopeConfig(layer.attention.rope.theta, RopeKind.NONE)
        return replace(layer, mixer=replace(layer.attention, rope=rope))

    return replace(model, layers=tuple(changed(it) if at in layers else it for at, it in enumerate(model.layers)))


def with_query_scaling(model: ModelConfig, scaling: QueryScaling) -> ModelConfig:
    """Return the model with queries that grow with their position, in every layer."""
    layers = tuple(replace(it, mixer=replace(it.attention, query_scaling=scaling)) for it in model.layers)
    return replace(model, layers=layers)


def with_biased_norms(model: ModelConfig, eps: float) -> ModelConfig:
    """Return the model with LayerNorms that have biases."""
    return replace(model, norm_eps=eps, norms_subtract_mean=True, norms_have_biases=True)


def no_rotation(_: Fields, __: int) -> RopeConfig:
    """Return the rotation of attention that sees no positions, in a model that may have learned them."""
    return RopeConfig(THETA, RopeKind.NONE)


def plain_ropes(fields: Fields, head_dim: int) -> RopeConfig:
    """Every kind of rotation that has no table of factors, over whole heads."""
    kinds = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)
    return read_rope(fields, kinds, head_dim=head_dim)


def unscaled_ropes(fields: Fields, head_dim: int) -> RopeConfig:
    """Rotations that change no length: YaRN scales what it rotates, which norms behind it would take away again."""
    return read_rope(fields, (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3), head_dim=head_dim)


def read_dense(
    fields: Fields,
    *,
    field: str = "hidden_act",
    activations: tuple[Activation, ...] = (Activation.SILU,),
    has_bias: bool = False,
) -> DenseConfig:
    """One width for gate and up; the activation is `read_activation`'s."""
    return DenseConfig(fields.integer("intermediate_size"), read_activation(fields, field, activations), has_bias)


def read_ungated(fields: Fields, *, field: str = "hidden_act") -> DenseConfig:
    """Read a feed-forward without a gate; the activation is `read_ungated_activation`'s."""
    activation = read_ungated_activation(fields, field)
    return DenseConfig(fields.integer("intermediate_size"), activation, fields.flag("mlp_bias", False))


def read_ungated_activation(fields: Fields, field: str) -> Ungated:
    """Return the activation that `field` names, of a feed-forward without a gate. Raises ModelConfigError."""
    return Ungated(fields.choice(field, tuple(it.value for it in Ungated), Ungated.RELU2.value))


def read_eager(fields: Fields, *, has_bias: bool, missing: str = "gelu_pytorch_tanh") -> DenseConfig:
    """Read a feed-forward without a gate whose activation PyTorch computes. Raises ModelConfigError for another one."""
    activation = _EAGER_ACTIVATIONS[fields.choice("hidden_act", tuple(_EAGER_ACTIVATIONS), missing)]
    return DenseConfig(fields.integer("intermediate_size"), activation, has_bias)


def read_activation(
    fields: Fields, field: str = "hidden_act", activations: tuple[Activation, ...] = (Activation.SILU,)
) -> Activation:
    """Return the activation that `field` names, one of `activations`; the first of them where it is missing."""
    names = {it.value: it for it in activations} | {name: it for name, it in _ALIASES.items() if it in activations}
    return names[fields.choice(field, tuple(names), activations[0].value)]


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"  # its older name
    return fields.choice(name, ("bfloat16", "float16", "float32"), "float32")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads and not fields.has("head_dim"):
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is absent")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse("head_dim", f"even for the rotary embedding (it is {head_dim})")
    return head_dim
