"""The towers of models that see images, from config.json: those of Qwen, Mistral 3, Gemma 3 and Gemma 4."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.config import AttentionConfig, LayerConfig, ModelConfig
from qualification.model.families.image_models import with_image_spans
from qualification.model.families.reader import text_part
from qualification.model.fields import Fields, ModelConfigError
from qualification.model.keys import Keys, family_keys
from qualification.model.rope import rope_section
from qualification.model.shared import read_activation
from qualification.model.tower import Merging, TowerConfig, TowerNames

_THETA = 10_000.0
_QWEN_KEYS = (
    "depth hidden_size hidden_act intermediate_size num_heads in_channels in_chans patch_size spatial_merge_size "
    "temporal_patch_size out_hidden_size rope_parameters"
)
_NOTES = "model_type tokens_per_second spatial_patch_size dtype torch_dtype architectures"
_OF_QWEN_2_5 = "window_size fullatt_block_indexes"
_OF_QWEN_3 = "num_position_embeddings deepstack_visual_indexes"
_OF_PIXTRAL = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels patch_size hidden_act head_dim "
    "rope_theta rope_parameters"
)
_OF_GEMMA_4 = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim global_head_dim "
    "hidden_activation rms_norm_eps attention_bias rope_parameters pooling_kernel_size patch_size "
    "position_embedding_size use_clipped_linears standardize"
)
_GEMMA_4_NOTES = "max_position_embeddings default_output_length"  # as many tokens as an image has: the processor's
_GEMMA_4_THETA = 100.0
_OF_GEMMA_4_UNIFIED = "patch_size pooling_kernel_size mm_embed_dim mm_posemb_size rms_norm_eps output_proj_dims"
_GEMMA_4_UNIFIED_NOTES = "num_soft_tokens model_patch_size"  # the processor's; a product of two others
_LAYER_NORM_EPS = 1e-5  # of torch's class
GEMMA_4_TOKENS = 1120  # the most of an image that its processor takes
_PIXTRAL_NOTES = "image_size vocab_size"  # as large as a processor lets images be; of no use
_PIXTRAL_EPS = 1e-5
_OF_SIGLIP = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels patch_size image_size hidden_act "
    "layer_norm_eps"
)
_SIGLIP_ACT = Activation.GELU_TANH.value
_SIGLIP_NOTES = "vision_use_head"  # of a result that the text does not read
_QWEN_3_NAMES = TowerNames(
    parts=("visual.",),
    patches="visual.patch_embed.proj",
    positions="visual.pos_embed.weight",
    layer="visual.blocks.{}",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    output="attn.proj",
    feed_forward_norm="norm2",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    merger="visual.merger",
    deepstack="visual.deepstack_merger_list.{}",
    merger_norm="norm",
    first="linear_fc1",
    second="linear_fc2",
)
QWEN_2_5_NAMES = replace(
    _QWEN_3_NAMES,
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    merger_norm="ln_q",
    first="mlp.0",
    second="mlp.2",
)
_PIXTRAL_NAMES = TowerNames(
    parts=("vision_tower.", "multi_modal_projector."),
    patches="vision_tower.patch_conv",
    patches_norm="vision_tower.ln_pre",
    layer="vision_tower.transformer.layers.{}",
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    feed_forward_norm="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    merger="multi_modal_projector",
    merger_norm="norm",
    merging="patch_merger.merging_layer",
    first="linear_1",
    second="linear_2",
)
_GEMMA_4_NAMES = TowerNames(
    parts=("vision_tower.", "embed_vision."),
    patches="vision_tower.patch_embedder.input_proj",
    positions="vision_tower.patch_embedder.position_embedding_table",
    layer="vision_tower.encoder.layers.{}",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    output="self_attn.o_proj.linear",
    after_attention="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    down="mlp.down_proj.linear",
    after_feed_forward="post_feedforward_layernorm",
    mean_bias="vision_tower.std_bias",
    mean_factor="vision_tower.std_scale",
    merger="embed_vision",
    second="embedding_projection",
)

_GEMMA_4_UNIFIED_NAMES = TowerNames(
    parts=("vision_embedder.", "embed_vision."),
    pixels_norm="vision_embedder.patch_ln1",
    patches="vision_embedder.patch_dense",
    product_norm="vision_embedder.patch_ln2",
    positions="vision_embedder.pos_embedding",
    patches_norm="vision_embedder.pos_norm",
    merger="embed_vision",
    second="embedding_projection",
)
_SIGLIP_NAMES = TowerNames(
    parts=("vision_tower.", "multi_modal_projector."),
    inner="vision_model.",
    patches="vision_tower.embeddings.patch_embedding",
    positions="vision_tower.embeddings.position_embedding.weight",
    layer="vision_tower.encoder.layers.{}",
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    feed_forward_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
    last_norm="vision_tower.post_layernorm",
    merger="multi_modal_projector",
    merger_norm="mm_soft_emb_norm",
    second="mm_input_projection_weight",
)


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The parts of a config.json that a tower is read from: vision_config, the whole, and the model of its text."""

    vision: Fields
    whole: Fields
    text: ModelConfig


ReadTower = Callable[[TowerSource], TowerConfig]
# (fields of the rotation of the text, pairs of dimensions of a head) -> which part of a position rotates each pair
ReadParts = Callable[[Fields, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """names   of the tensors, as far as all towers of the family have the same
    read_parts  None where positions of images have one part, as those of text
    """

    names: TowerNames
    read: ReadTower
    read_parts: ReadParts | None = None


def with_known_tower(model: ModelConfig, config: Mapping[str, object], source: str = "config.json") -> ModelConfig:
    """Return the model with its tower where it has one that is known, else as it is. Raises ModelConfigError."""
    has_one = config.get("model_type") in TOWERS and isinstance(config.get("vision_config"), Mapping)
    return with_tower(model, config, source) if has_one else model


def with_tower(model: ModelConfig, config: Mapping[str, object], source: str) -> ModelConfig:
    """Return the model of a parsed config.json with its tower, and positions of as many parts as its images need.

    Raises ModelConfigError for a model that has no tower that is known, and for a tower that cannot be computed.
    """
    known, whole = TOWERS.get(str(config.get("model_type"))), Fields(config, source)
    vision = whole.section("vision_config")
    if known is None or vision is None:
        names = ", ".join(sorted(TOWERS))
        raise ModelConfigError(f"{source}: it has no images that can be served: those of {names} can")
    tower = known.read(TowerSource(vision, whole, model))
    if tower.out_size != model.hidden_size:
        vision.refuse("out_hidden_size", f"{model.hidden_size}, the hidden_size of the text")
    if len(tower.deepstack) > model.num_layers:
        vision.refuse("deepstack_visual_indexes", f"at most {model.num_layers}, one a layer of the text")
    layers = model.layers
    if known.read_parts is not None:
        rope = rope_section(Fields(text_part(config), source)) or Fields({}, source)
        layers = tuple([_in_parts(layer, rope, known.read_parts) for layer in layers])
    return with_image_spans(replace(model, layers=layers, tower=tower), config)


def _in_parts(layer: LayerConfig, rope: Fields, read_parts: ReadParts) -> LayerConfig:
    """Return a layer whose rotation takes a position's parts; one that does not attend as it is."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionConfig):
        return layer
    parts = read_parts(rope, mixer.rope.rotated_dims(mixer.head_dim) // 2)
    return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, position_parts=parts)))


def _read_qwen_2_5(source: TowerSource) -> TowerConfig:
    fields = source.vision
    _check_keys(fields, f"{_QWEN_KEYS} {_OF_QWEN_2_5}")
    common, depth = _common(fields, Activation.SILU, depth=32, patch_size=14, width=3420), fields.integer("depth", 32)
    side = common.patch_size * common.merge
    window = fields.integer("window_size", 112)
    if window % side:
        fields.refuse("window_size", f"a multiple of {side} pixels, those of a token")
    full = fields.given("fullatt_block_indexes")
    full_layers = frozenset({7, 15, 23, 31}) if full is None else fields.indices("fullatt_block_indexes", depth)
    return replace(common, names=QWEN_2_5_NAMES, is_gated=True, window=window // side, full_layers=full_layers)


def _read_qwen_3_5(source: TowerSource) -> TowerConfig:
    """Read that of Qwen 3.5: Qwen 3's without deepstack."""
    if source.vision.given("deepstack_visual_indexes") not in (None, []):
        source.vision.refuse("deepstack_visual_indexes", "absent or empty in this family")
    return replace(_read_qwen_3(source), deepstack=())


def _read_qwen_3(source: TowerSource) -> TowerConfig:
    fields = source.vision
    _check_keys(fields, f"{_QWEN_KEYS} {_OF_QWEN_3}")
    common = _common(fields, Activation.GELU_TANH, depth=27, patch_size=16, width=4304)
    count = fields.integer("num_position_embeddings", 2304)
    side = round(count**0.5)
    if side**2 != count or side < 2:
        fields.refuse("num_position_embeddings", "the square of an integer from 2 on")
    deepstack: tuple[int, ...] = (8, 16, 24)
    if fields.has("deepstack_visual_indexes"):
        deepstack = tuple(sorted(fields.indices("deepstack_visual_indexes", common.num_layers)))
        if list(deepstack) != fields.given("deepstack_visual_indexes"):
            fields.refuse("deepstack_visual_indexes", "in order, each layer once")
    return replace(common, num_positions=side, deepstack=deepstack)


def _common(fields: Fields, activation: Activation, *, depth: int, patch_size: int, width: int) -> TowerConfig:
    """Return what the towers of Qwen have in common, with what their classes have where a field is missing."""
    sides = fields.integers("patch_size", 2, patch_size)
    frames = fields.integers("temporal_patch_size", 1, 2)
    if sides[0] != sides[1]:
        fields.refuse("patch_size", "one size of both sides")
    for name in ("in_channels", "in_chans"):
        if fields.integer(name, 3) != 3:
            fields.refuse(name, "3, red, green and blue")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_heads", 16)
    if hidden % heads or hidden // heads % 4:
        fields.refuse("num_heads", f"a divisor of hidden_size ({hidden}) with heads of a multiple of 4 numbers")
    rope = fields.section("rope_parameters") or Fields({}, fields.source)
    rope.choice("rope_type", ("axial", "default"), "axial")
    return TowerConfig(
        num_layers=fields.integer("depth", depth),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", width),
        activation=Activation(fields.choice("hidden_act", (activation.value,), activation.value)),
        is_gated=False,
        patch_size=sides[0],
        num_frames=frames[0],
        merge=fields.integer("spatial_merge_size", 2),
        out_size=fields.integer("out_hidden_size", 3584),
        names=_QWEN_3_NAMES,
        rope_theta=rope.number("rope_theta", _THETA),
    )


def _read_pixtral(source: TowerSource) -> TowerConfig:
    """Read that of Mistral 3, and its projector, which are all of its classes': patches with RMSNorms, no biases."""
    fields, whole = source.vision, source.whole
    fields.choice("model_type", ("pixtral",), "pixtral")
    _check_keys(fields, _OF_PIXTRAL, _PIXTRAL_NOTES)
    sides = fields.integers("patch_size", 2, 16)
    if sides[0] != sides[1]:
        fields.refuse("patch_size", "one size of both sides")
    if fields.integer("num_channels", 3) != 3:
        fields.refuse("num_channels", "3, red, green and blue")
    hidden, heads = fields.integer("hidden_size", 1024), fields.integer("num_attention_heads", 16)
    if hidden % heads or hidden // heads % 4:
        fields.refuse(
            "num_attention_heads", f"a divisor of hidden_size ({hidden}) with heads of a multiple of 4 numbers"
        )
    if fields.integer("head_dim", hidden // heads) != hidden // heads:
        fields.refuse("head_dim", f"{hidden // heads}, hidden_size by num_attention_heads")
    whole.choice("projector_hidden_act", (Activation.GELU.value,), Activation.GELU.value)
    rope = fields.section("rope_parameters") or Fields({}, fields.source)
    rope.choice("rope_type", ("axial", "default"), "axial")
    return TowerConfig(
        num_layers=_num_read_layers(whole, fields.integer("num_hidden_layers", 24)),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 4096),
        activation=read_activation(fields, activations=(Activation.GELU, Activation.SILU, Activation.GELU_TANH)),
        is_gated=True,
        patch_size=sides[0],
        num_frames=1,
        merge=whole.integer("spatial_merge_size", 2),
        out_size=source.text.hidden_size,
        names=_PIXTRAL_NAMES,
        has_biases=False,
        merger_has_biases=whole.flag("multimodal_projector_bias", False),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", _THETA)),
        norm_eps=_PIXTRAL_EPS,
        alternates_rates=True,
        norms_patches=True,
        merging=Merging.PRODUCT,
        merger_eps=source.text.norm_eps,
        has_line_ends=True,
    )


def _read_siglip(source: TowerSource) -> TowerConfig:
    """Read that of Gemma 3: SigLIP over images of one size, with what its class has where a field is missing."""
    fields, whole = source.vision, source.whole
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    _check_keys(fields, _OF_SIGLIP, _SIGLIP_NOTES)
    if fields.integer("num_channels", 3) != 3:
        fields.refuse("num_channels", "3, red, green and blue")
    hidden, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if hidden % heads:
        fields.refuse("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    patch, image = fields.integer("patch_size", 16), fields.integer("image_size", 224)
    if image % patch:
        fields.refuse("image_size", f"a multiple of patch_size ({patch})")
    side, num_tokens = image // patch, whole.integer("mm_tokens_per_image", 256)
    merge = side // math.isqrt(num_tokens)
    if merge**2 * num_tokens != side**2:
        whole.refuse("mm_tokens_per_image", f"a number of squares of the {side} x {side} patches of an image")
    return TowerConfig(
        num_layers=fields.integer("num_hidden_layers", 12),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 3072),
        activation=Activation(fields.choice("hidden_act", (_SIGLIP_ACT,), _SIGLIP_ACT)),
        is_gated=False,
        patch_size=patch,
        num_frames=1,
        merge=merge,
        out_size=source.text.hidden_size,
        names=_SIGLIP_NAMES,
        num_positions=side,
        rope_theta=None,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        merging=Merging.MEAN,
        merger_has_biases=False,
        norms_means=True,
        image_side=side,
    )


def _read_gemma_4(source: TowerSource) -> TowerConfig:
    """Read that of Gemma 4: RMSNorms before and behind, normed heads, and means of squares of patches."""
    fields = source.vision
    fields.choice("model_type", ("gemma4_vision",), "gemma4_vision")
    _check_keys(fields, _OF_GEMMA_4, _GEMMA_4_NOTES)
    hidden, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    head_dim = fields.integer("head_dim", 64)
    if hidden != heads * head_dim or head_dim % 4:
        fields.refuse("head_dim", f"a multiple of 4, and hidden_size ({hidden}) by num_attention_heads ({heads})")
    for name, missing, due in (("num_key_value_heads", 12, heads), ("global_head_dim", head_dim, head_dim)):
        if fields.integer(name, missing) != due:
            fields.refuse(name, f"{due}, as the queries have")
    if fields.flag("attention_bias", False):
        fields.refuse("attention_bias", "false: its class has no biases")
    rope = fields.section("rope_parameters") or Fields({}, fields.source)
    rope.choice("rope_type", ("axial", "default"), "axial")
    activations = (Activation.GELU_TANH, Activation.GELU, Activation.SILU)
    return TowerConfig(
        num_layers=fields.integer("num_hidden_layers", 16),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 3072),
        activation=read_activation(fields, "hidden_activation", activations),
        is_gated=True,
        patch_size=fields.integer("patch_size", 16),
        num_frames=1,
        merge=fields.integer("pooling_kernel_size", 3),
        out_size=source.text.hidden_size,
        names=_GEMMA_4_NAMES,
        has_biases=False,
        merger_has_biases=False,
        rope_theta=rope.number("rope_theta", _GEMMA_4_THETA),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        most_tokens=GEMMA_4_TOKENS,
        num_places=fields.integer("position_embedding_size", 10_240),
        norms_heads=True,
        splits_heads=True,
        norms_after=True,
        has_bounds=fields.flag("use_clipped_linears", False),
        reads_colours_last=True,
        merging=Merging.MEAN,
        standardizes=fields.flag("standardize", False),
    )


def _read_gemma_4_unified(source: TowerSource) -> TowerConfig:
    """Read that of Gemma 4 12B, which has no layers: squares of pixels are normed, multiplied and placed."""
    fields = source.vision
    fields.choice("model_type", ("gemma4_unified_vision",), "gemma4_unified_vision")
    _check_keys(fields, _OF_GEMMA_4_UNIFIED, _GEMMA_4_UNIFIED_NOTES)
    hidden = fields.integer("mm_embed_dim", 3840)
    if fields.integer("output_proj_dims", hidden) != hidden:
        fields.refuse("output_proj_dims", f"{hidden}, as mm_embed_dim")
    return TowerConfig(
        num_layers=0,
        hidden_size=hidden,
        num_heads=1,
        width=0,
        activation=Activation.GELU,
        is_gated=False,
        patch_size=fields.integer("patch_size", 16) * fields.integer("pooling_kernel_size", 3),
        num_frames=1,
        merge=1,
        out_size=source.text.hidden_size,
        names=_GEMMA_4_UNIFIED_NAMES,
        merger_has_biases=False,
        rope_theta=None,
        norm_eps=_LAYER_NORM_EPS,
        norms_patches=True,
        norms_pixels=True,
        merging=Merging.MEAN,
        merger_eps=fields.number("rms_norm_eps", 1e-6),
        scales_means=False,
        most_tokens=GEMMA_4_TOKENS,
        num_places=fields.integer("mm_posemb_size", 1120),
        places_first=True,
        reads_colours_last=True,
    )


def _num_read_layers(whole: Fields, num_layers: int) -> int:
    """Return how many layers are computed: those up to the one whose results the projector reads."""
    name = "vision_feature_layer"
    given = whole.given(name) if whole.has(name) else -1
    layer = given[0] if isinstance(given, list) and len(given) == 1 else given
    if type(layer) is not int or not 0 < (found := layer if layer >= 0 else num_layers + 1 + layer) <= num_layers:
        whole.refuse(name, f"one layer, from 1 to {num_layers}, or from -{num_layers} to -1 counted from the last one")
    return found


def _check_keys(fields: Fields, own: str, notes: str = "") -> None:
    """Raise ModelConfigError for a key that is not known: what it asks for would be missing from each image."""
    without_effect = frozenset(f"{_NOTES} {notes}".split()) | family_keys().without_effect
    known = Keys(frozenset(own.split()), without_effect)
    for name in known.unknown(fields.names):
        fields.refuse(name, "absent (it is not known for this tower, and its images would be others)")


def _in_sections(rope: Fields, num_pairs: int) -> tuple[int, ...]:
    """Qwen 2.5: the first pairs by time, then those by height, then those by width."""
    sections = _sections(rope, (16, 24, 24))
    if sum(sections) != num_pairs:
        rope.refuse("mrope_section", f"numbers that sum up to {num_pairs}, the pairs of a head's dimensions")
    return tuple(part for part, count in enumerate(sections) for _ in range(count))


def _interleaved(rope: Fields, num_pairs: int, *, missing: tuple[int, int, int] = (24, 20, 20)) -> tuple[int, ...]:
    """Qwen 3: time, height and width in turns, as long as the two have pairs left; then time."""
    _, height, width = _sections(rope, missing)
    limits = {1: 3 * height, 2: 3 * width}
    return tuple(pair % 3 if pair < limits.get(pair % 3, 0) else 0 for pair in range(num_pairs))


def _sections(rope: Fields, missing: tuple[int, int, int]) -> tuple[int, ...]:
    if not rope.has("mrope_section"):
        return missing
    found = rope.given("mrope_section")
    if not isinstance(found, list) or len(found) != 3 or not all(type(it) is int and it >= 0 for it in found):
        rope.refuse("mrope_section", "a list of 3 integers from 0 on")
    return tuple(found)


_QWEN_3 = TowerFamily(_QWEN_3_NAMES, _read_qwen_3, _interleaved)
_QWEN_3_5 = TowerFamily(_QWEN_3_NAMES, _read_qwen_3_5, partial(_interleaved, missing=(11, 11, 10)))
TOWERS: Mapping[str, TowerFamily] = {
    "qwen2_5_vl": TowerFamily(QWEN_2_5_NAMES, _read_qwen_2_5, _in_sections),
    "qwen3_vl": _QWEN_3,
    "qwen3_vl_moe": _QWEN_3,
    "qwen3_5": _QWEN_3_5,
    "qwen3_5_moe": _QWEN_3_5,
    "mistral3": TowerFamily(_PIXTRAL_NAMES, _read_pixtral),
    "gemma3": TowerFamily(_SIGLIP_NAMES, _read_siglip),
    "gemma4": TowerFamily(_GEMMA_4_NAMES, _read_gemma_4),
    "gemma4_unified": TowerFamily(_GEMMA_4_UNIFIED_NAMES, _read_gemma_4_unified),
}
