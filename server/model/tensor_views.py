"""Places of a decoder's weights in a checkpoint."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.ungated.weights import ANY_UNGATED
from kernels.experts.weights import ExpertWeights
from kernels.linear.weights import PlainWeight, StoredTensor
from qualification.model.config import AttentionConfig, LayerConfig, ModelConfig
from qualification.model.draft_head import PREFIX, PRODUCT
from qualification.model.families.family import ExpertLayout, ExpertNames, RecurrenceNames, TensorNames, within
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.latent import LatentAttentionConfig
from server.errors import ModelError
from server.model.layers import DenseWeights, GatedDeltaWeights, LatentWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Linear

HEAD_BIAS = "lm_head.bias"
_DENSE = TensorNames().dense
_INDEXER = "self_attn.indexer"  # of DeepSeek sparse attention, in every published class


def checkpoint_views(weights: Weights, config: ModelConfig, names: TensorNames) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name, as the tensor, or the view of rows of a merged weight, that each fills.

    Experts whose gate and up alternate are left out: no view has their order. Raises ModelError where a format keeps
    rows together that the checkpoint, or a rank, has apart.
    """
    views = {"model.embed_tokens.weight": StoredTensor(weights.embedding)}
    if names.norms_are_stored:
        views[f"model.{names.final_norm}.weight"] = StoredTensor(weights.final_norm)
    if weights.final_norm_bias is not None:
        views[f"model.{names.final_norm}.bias"] = StoredTensor(weights.final_norm_bias)
    if weights.positions is not None:
        views["model.embed_positions.weight"] = StoredTensor(weights.positions)
    if weights.per_layer is not None:
        views["model.embed_tokens_per_layer.weight"] = StoredTensor(weights.per_layer.embedding)
        views["model.per_layer_model_projection.weight"] = weights.per_layer.product.weight.stored["weight"]
        views["model.per_layer_projection_norm.weight"] = StoredTensor(weights.per_layer.norm)
    if not config.tie_embeddings:
        views |= {f"lm_head.{word}": stored for word, stored in weights.head.weight.stored.items()}
    if weights.head_bias is not None:
        views[HEAD_BIAS] = StoredTensor(weights.head_bias)
    if weights.draft is not None:
        views[PRODUCT] = weights.draft.product.weight.stored["weight"]
        views[f"{PREFIX}pre_fc_norm_embedding.weight"] = StoredTensor(weights.draft.embedding_norm)
        views[f"{PREFIX}pre_fc_norm_hidden.weight"] = StoredTensor(weights.draft.hidden_norm)
        views[f"{PREFIX}norm.weight"] = StoredTensor(weights.draft.norm)
    for index, (layer, layer_config) in enumerate(zip(weights.layers, config.layers, strict=True)):
        views |= layer_views(index, layer, layer_config, names)
    return views


def layer_views(index: int, layer: LayerWeights, config: LayerConfig, names: TensorNames) -> dict[str, StoredTensor]:
    """Return the views of one layer's tensors. Raises ModelError likewise."""
    layer = layer.as_published(config)
    prefix = f"model.layers.{index}"
    norms = [(names.q_norm, layer.q_norm), (names.k_norm, layer.k_norm)]
    if names.norms_are_stored:
        norms += [
            (names.before_attention, layer.attention_norm),
            (names.after_attention, layer.norm_after_attention),
            (names.before_feed_forward, layer.feed_forward_norm),
            (names.after_feed_forward, layer.norm_after_feed_forward),
        ]
    biases = (
        (names.before_attention, layer.attention_norm_bias),
        (names.before_feed_forward, layer.feed_forward_norm_bias),
    )
    views = {f"{prefix}.{name}.weight": StoredTensor(norm) for name, norm in norms if norm is not None}
    views |= {f"{prefix}.{name}.bias": StoredTensor(bias) for name, bias in biases if bias is not None}
    if layer.beside is not None and config.of_beside is not None:
        views |= layer_views(index, layer.beside, config.of_beside, names)
    if layer.recurrence is not None:
        assert names.recurrence is not None, "the family has recurrent layers"
        own = f"{prefix}.{names.recurrence.prefix}"
        found = _beside_recurrence(layer.recurrence, config, names.recurrence)
        views |= {f"{own}.{name}": StoredTensor(it) for name, it in found.items()}
    if layer.convolution is not None:
        own = f"{prefix}.{names.convolution}.conv"
        views[f"{own}.weight"] = StoredTensor(layer.convolution.taps)
        if layer.convolution.bias is not None:
            views[f"{own}.bias"] = StoredTensor(layer.convolution.bias)
    if layer.latent is not None:
        views[f"{prefix}.{names.attention}.kv_a_layernorm.weight"] = StoredTensor(layer.latent.norm)
        if layer.latent.query_norm is not None:
            views[f"{prefix}.{names.attention}.q_a_layernorm.weight"] = StoredTensor(layer.latent.query_norm)
        if (indexer := layer.latent.indexer) is not None:
            views[f"{prefix}.{_INDEXER}.k_norm.weight"] = StoredTensor(indexer.norm)
            views[f"{prefix}.{_INDEXER}.k_norm.bias"] = StoredTensor(indexer.bias)
    if isinstance(layer.feed_forward, DenseWeights) and layer.feed_forward.xielu is not None:
        own = within(names.feed_forward, "act_fn")
        views |= {f"{prefix}.{own}.{name}": StoredTensor(it) for name, it in layer.feed_forward.xielu.stored.items()}
    if layer.sinks is not None:
        views[f"{prefix}.{names.sinks}"] = StoredTensor(layer.sinks)
    if layer.per_layer is not None:
        views[f"{prefix}.post_per_layer_input_norm.weight"] = StoredTensor(layer.per_layer.norm)
    if layer.scale is not None:
        views[f"{prefix}.layer_scalar"] = StoredTensor(layer.scale)
    if isinstance(layer.feed_forward, MixtureWeights):
        views |= {f"{prefix}.{name}": StoredTensor(it) for name, it in _beside_experts(layer.feed_forward).items()}
    try:
        linears = _linears(layer, config, names)
    except ValueError as error:
        raise ModelError(f"{prefix}: {error}") from error
    if isinstance(layer.feed_forward, MixtureWeights) and layer.feed_forward.correction_bias is not None:
        assert names.experts is not None, "the family has mixtures"
        bias = layer.feed_forward.correction_bias
        bias = bias[None] if names.experts.correction_is_matrix else bias
        views[f"{prefix}.{names.experts.correction_bias}"] = StoredTensor(bias)
    for name, linear in linears.items():
        of_product = linear.weight.stored
        if names.products_are_turned:
            of_product = {"weight": turned(of_product["weight"])}
        views |= {f"{prefix}.{name}.{word}": stored for word, stored in of_product.items()}
        if linear.bias is not None:
            views[f"{prefix}.{name}.bias"] = StoredTensor(linear.bias)
    if names.experts is not None and names.experts.has_image_experts and isinstance(layer.feed_forward, MixtureWeights):
        name = f"{prefix}.{names.experts.router}.weight"
        views[name] = StoredTensor(views[name].values.T)
    return views


def turned(stored: StoredTensor) -> StoredTensor:
    """Return the view of a plain weight whose rows are its columns."""
    return StoredTensor(stored.values.T)


def _beside_recurrence(weights: GatedDeltaWeights, config: LayerConfig, names: RecurrenceNames) -> dict[str, Tensor]:
    """Return the tensors of a recurrence that are no products."""
    if _is_lightning(config):
        return {"g_norm.weight": weights.norm}
    found = {"A_log": weights.a_log, "dt_bias": weights.dt_bias}
    if names.is_apart:
        parts = weights.conv.split_with_sizes(_channels(config))
        found |= {"A_log": weights.a_log[None, None, :, None], "o_norm.weight": weights.norm}
        return found | {f"{it}_conv1d.weight": part for it, part in zip("qkv", parts, strict=True)}
    found["conv1d.weight"] = weights.conv
    if weights.norm.numel():
        found["norm.weight"] = weights.norm
    if weights.conv_bias is not None and weights.skip is not None:
        found |= {"conv1d.bias": weights.conv_bias, "D": weights.skip}
    return found


def _linears(layer: LayerWeights, config: LayerConfig, names: TensorNames) -> dict[str, Linear]:
    """Raises ValueError where a format keeps rows together that the checkpoint, or a rank, has apart."""
    linears: dict[str, Linear] = {}
    if layer.qkv is None:
        pass
    elif layer.convolution is not None:
        projected, output = layer.mixed_by
        linears = {f"{names.convolution}.in_proj": projected, f"{names.convolution}.out_proj": output}
    elif layer.recurrence is None:
        linears = _attention(layer, config, names)
    else:
        assert names.recurrence is not None, "the family has recurrent layers"
        of_kind = _kimi if names.recurrence.is_apart else _recurrence
        if _is_lightning(config):
            of_kind = partial(_lightning, output_name=names.attention_output)
        linears = of_kind(layer, layer.recurrence, config, names.recurrence)
    if layer.per_layer is not None:
        linears["per_layer_input_gate"] = layer.per_layer.gate
        linears["per_layer_projection"] = layer.per_layer.output
    if isinstance(layer.feed_forward, DenseWeights):
        return linears | _dense(layer.feed_forward, names.feed_forward, names.dense, names.dense_joined)
    if layer.feed_forward is None:
        return linears
    assert names.experts is not None, "the family has mixtures"
    return linears | _mixture(layer.feed_forward, names.experts)


def _attention(layer: LayerWeights, config: LayerConfig, names: TensorNames) -> dict[str, Linear]:
    """Queries, keys and values apart, or as one tensor."""
    qkv, output = layer.mixed_by
    if layer.latent is not None:
        return _latent(layer.latent, config.attention, qkv, output, names)
    if names.qkv is not None:
        return {f"{names.attention}.{names.qkv}": qkv, names.attention_output: output}
    attention = config.attention
    gate = {} if layer.attention_gate is None else {names.attention_gate: layer.attention_gate}
    of_gates = attention.gate_size if attention.gate is not None and attention.gate.is_beside_queries else 0
    sizes = attention.part_sizes
    parts = qkv.split(sizes[0] + of_gates, *sizes[1:])  # queries with their gates
    found = {f"{names.attention}.{name}_proj": part for name, part in zip("qkv", parts, strict=False)}
    return {**found, names.attention_output: output, **gate}


def _latent(
    weights: LatentWeights, config: AttentionConfig, projected: Linear, output: Linear, names: TensorNames
) -> dict[str, Linear]:
    """The first product is two tensors: of queries or of their latent, then of latents and what is rotated."""
    assert isinstance(config, LatentAttentionConfig), "weights are of the kind that the configuration says"
    own, of_keys = projected.split(config.num_projected_queries, config.sizes.key)
    prefix, found = names.attention, {names.attention_output: output}
    found |= {f"{prefix}.kv_a_proj_with_mqa": of_keys, f"{prefix}.kv_b_proj": weights.kv_up}
    if weights.query_up is None:
        return {f"{prefix}.q_proj": own, **found}
    if (indexer := weights.indexer) is not None:
        found |= {
            f"{_INDEXER}.wq_b": indexer.queries,
            f"{_INDEXER}.wk": indexer.key,
            f"{_INDEXER}.weights_proj": indexer.weights,
        }
    return {f"{prefix}.q_a_proj": own, f"{prefix}.q_b_proj": weights.query_up, **found}


def _is_lightning(config: LayerConfig) -> bool:
    return isinstance(config.mixer, GatedDeltaConfig) and config.mixer.fixed is not None


def _lightning(
    layer: LayerWeights, _: GatedDeltaWeights, config: LayerConfig, names: RecurrenceNames, *, output_name: str
) -> dict[str, Linear]:
    """Queries, keys and values as one tensor, and the gates of the result as another."""
    (whole, output), qkv_sizes = layer.mixed_by, _channels(config)
    qkv, gates = whole.split(sum(qkv_sizes), qkv_sizes[2])
    return {f"{names.prefix}.query_key_value": qkv, f"{names.prefix}.g_proj": gates, output_name: output}


def _channels(config: LayerConfig) -> tuple[int, int, int]:
    """Return the channels of queries, of keys and of values of a recurrent layer."""
    assert isinstance(config.mixer, GatedDeltaConfig), "weights are of the kind that the configuration says"
    keys = config.mixer.sizes.num_key_heads * config.mixer.sizes.key_dim
    return keys, keys, config.mixer.value_size


def _kimi(
    layer: LayerWeights, weights: GatedDeltaWeights, config: LayerConfig, names: RecurrenceNames
) -> dict[str, Linear]:
    """Queries, keys, values, the gates of writing, and both products of decays and of the gates of the result."""
    prefix, (whole, gates), (_, output) = names.prefix, _first_and_gates(layer, weights, config), layer.mixed_by
    assert weights.decays is not None, "weights are of the kind that the configuration says"
    assert weights.output_gates is not None, "weights are of the kind that the configuration says"
    heads, inner = weights.a_log.shape[0], weights.decays.weight.size[1]
    found = dict(zip(("q_proj", "k_proj", "v_proj"), whole.split(*_channels(config)), strict=True))
    found |= dict(zip(("b_proj", "f_a_proj", "g_a_proj"), gates.split(heads, inner, inner), strict=True))
    found |= {"f_b_proj": weights.decays, "g_b_proj": weights.output_gates, "o_proj": output}
    return {f"{prefix}.{name}": linear for name, linear in found.items()}


def _recurrence(
    layer: LayerWeights, weights: GatedDeltaWeights, config: LayerConfig, names: RecurrenceNames
) -> dict[str, Linear]:
    """Queries, keys and values, gates of the result, and the others: apart, or two of each as one tensor."""
    prefix, (whole, output) = names.prefix, layer.mixed_by
    found = {f"{prefix}.out_proj": output}
    if weights.skip is not None:
        return {f"{prefix}.in_proj": whole, **found}
    whole, gates = _first_and_gates(layer, weights, config)
    if names.is_fused:
        return {f"{prefix}.in_proj_qkvz": whole, f"{prefix}.in_proj_ba": gates, **found}
    channels, heads = weights.conv.shape[0], weights.a_log.shape[0]
    qkv, z = whole.split(channels, whole.weight.size[0] - channels)
    b, a = gates.split(heads, heads)
    names_of = {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
    return {f"{prefix}.{name}": linear for name, linear in names_of.items()} | found


def _first_and_gates(layer: LayerWeights, weights: GatedDeltaWeights, config: LayerConfig) -> tuple[Linear, Linear]:
    """Return what makes queries, keys and values, and what makes gates: of one weight its first and its last rows."""
    assert isinstance(config.mixer, GatedDeltaConfig), "weights are of the kind that the configuration says"
    whole, _ = layer.mixed_by
    if weights.gates is not None:
        return whole, weights.gates
    first, gates = whole.split(config.mixer.projected_size, config.mixer.num_gates)
    return first, gates


def _dense(
    weights: DenseWeights, prefix: str, names: tuple[str, str, str] = _DENSE, joined: tuple[str, str] | None = None
) -> dict[str, Linear]:
    """Gate and up apart, by `names` of them and of the last product, or as one tensor, by `joined`."""
    if joined is not None:
        return {within(prefix, joined[0]): weights.gate_up, within(prefix, joined[1]): weights.down}
    width = weights.down.weight.size[1]
    if weights.gate_up.weight.size[0] == width:
        return {within(prefix, names[1]): weights.gate_up, within(prefix, names[2]): weights.down}
    gate, up = weights.gate_up.split(width, width)
    return {within(prefix, name): it for name, it in zip(names, (gate, up, weights.down), strict=True)}


def _beside_experts(weights: MixtureWeights) -> dict[str, Tensor]:
    """Return what Gemma 4 has beside the products of a mixture."""
    found = {} if weights.expert_scales is None else {"router.per_expert_scale": weights.expert_scales}
    if (norms := weights.norms) is not None:
        found |= {
            "router.scale": norms.router,
            "pre_feedforward_layernorm_2.weight": norms.experts,
            "post_feedforward_layernorm_2.weight": norms.after_experts,
            "post_feedforward_layernorm_1.weight": norms.after_shared,
        }
    return found


def _mixture(weights: MixtureWeights, names: ExpertNames) -> dict[str, Linear]:
    found = {names.router: weights.router}
    if weights.shared is not None:
        if names.shared_gate_up is None:
            found |= _dense(weights.shared, names.shared)
        else:
            found[f"{names.shared}.{names.shared_gate_up}"] = weights.shared.gate_up
            found[f"{names.shared}.{names.shared_down}"] = weights.shared.down
    if weights.shared_gate is not None:
        found[names.shared_gate] = _plain(weights.shared_gate)
    if weights.to_latent is not None and weights.from_latent is not None:
        found |= {names.to_latent: weights.to_latent, names.from_latent: weights.from_latent}
    if names.layout is ExpertLayout.EACH:
        width = weights.experts.width
        for index, (gate_up, down) in enumerate(_each_expert(weights.experts)):
            prefix = f"{names.experts}.{index}"
            inner = (names.up,) if isinstance(weights.experts, ANY_UNGATED) else (names.gate, names.up)
            parts = gate_up.split(*(width for _ in inner))
            found |= {f"{prefix}.{name}": part for name, part in zip((*inner, names.down), (*parts, down), strict=True)}
    return found


def _each_expert(experts: AnyExperts) -> Iterator[tuple[Linear, Linear]]:
    """Yield gate and up, and down, of each expert."""
    if isinstance(experts, FewBitExperts):
        for index in range(experts.num_experts):
            gate_up, down = experts.weights_of(index)
            yield Linear(gate_up), Linear(down)
    else:
        assert isinstance(experts, ExpertWeights), "others are kept together"
        for pair in zip(experts.gate_up, experts.down, strict=True):
            yield _plain(pair[0]), _plain(pair[1])


def _plain(values: Tensor) -> Linear:
    return Linear(PlainWeight(values))
