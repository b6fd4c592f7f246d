"""The towers of models that see images, from config.json: a table of all, and those of Mistral 3, Gemma 3 and 4."""

import math
from collections.abc import Mapping
from dataclasses import replace

from kernels.fused.activation_kind import Activation
from qualification.model.config import AttentionConfig, LayerConfig, ModelConfig
from qualification.model.families.glm_towers import GLM_TOWERS
from qualification.model.families.image_models import with_image_spans
from qualification.model.families.internvl_tower import INTERNVL_TOWER
from qualification.model.families.paddleocr_vl import PADDLEOCR_VL_TOWER
from qualification.model.families.qwen_towers import QWEN_TOWERS
from qualification.model.families.reader import text_part
from qualification.model.families.tower_family import (
    AXIAL_THETA,
    ReadParts,
    TowerFamily,
    TowerSource,
    check_keys,
    num_read_layers,
)
from qualification.model.fields import Fields, ModelConfigError
from qualification.model.rope import rope_section
from qualification.model.shared import read_activation
from qualification.model.tower import Merging, TowerConfig, TowerNames

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
_FEATURE_LAYER = "vision_feature_layer"
_OF_SIGLIP = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels patch_size image_size hidden_act "
    "layer_norm_eps"
)
_SIGLIP_ACT = Activation.GELU_TANH.value
_SIGLIP_NOTES = "vision_use_head"  # of a result that the text does not read
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
_LLAVA_NAMES = replace(_PIXTRAL_NAMES, merger_norm="", merging="")
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


def _read_pixtral(source: TowerSource) -> TowerConfig:
    """Read that of Mistral 3, and its projector, which are all of its classes': patches with RMSNorms, no biases."""
    fields, whole = source.vision, source.whole
    fields.choice("model_type", ("pixtral",), "pixtral")
    check_keys(fields, _OF_PIXTRAL, _PIXTRAL_NOTES)
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
        num_layers=num_read_layers(whole, fields.integer("num_hidden_layers", 24)),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 4096),
        activation=read_activation(fields, activations=(Activation.GELU, Activation.SILU, Activation.GELU_TANH)),
        is_gated=True,
        has_rms_norms=True,
        patch_size=sides[0],
        num_frames=1,
        merge=whole.integer("spatial_merge_size", 2),
        out_size=source.text.hidden_size,
        names=_PIXTRAL_NAMES,
        has_biases=False,
        has_patch_bias=False,
        merger_has_biases=whole.flag("multimodal_projector_bias", False),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", AXIAL_THETA)),
        norm_eps=_PIXTRAL_EPS,
        alternates_rates=True,
        norms_patches=True,
        merging=Merging.PRODUCT,
        merger_eps=source.text.norm_eps,
        has_line_ends=True,
    )


def _read_llava(source: TowerSource) -> TowerConfig:
    """Read that of Pixtral in the class of LLaVA, with what this has where a field is missing.

    A token is one patch, of which two products make it.
    """
    given = source.whole
    whole = given if given.has(_FEATURE_LAYER) else given.changed(**{_FEATURE_LAYER: -2})
    whole.choice("vision_feature_select_strategy", ("full",), "default")
    found = _read_pixtral(replace(source, whole=whole.changed(spatial_merge_size=1)))
    return replace(
        found,
        names=_LLAVA_NAMES,
        merging=Merging.BESIDE,
        merger_width=found.out_size,
        merger_has_biases=whole.flag("multimodal_projector_bias", True),
        merger_has_norm=False,
        merger_eps=None,
    )


def _read_siglip(source: TowerSource) -> TowerConfig:
    """Read that of Gemma 3: SigLIP over images of one size, with what its class has where a field is missing."""
    fields, whole = source.vision, source.whole
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    check_keys(fields, _OF_SIGLIP, _SIGLIP_NOTES)
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
    check_keys(fields, _OF_GEMMA_4, _GEMMA_4_NOTES)
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
        has_rms_norms=True,
        patch_size=fields.integer("patch_size", 16),
        num_frames=1,
        merge=fields.integer("pooling_kernel_size", 3),
        out_size=source.text.hidden_size,
        names=_GEMMA_4_NAMES,
        has_biases=False,
        has_patch_bias=False,
        merger_has_biases=False,
        rope_theta=rope.number("rope_theta", _GEMMA_4_THETA),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        most_tokens=GEMMA_4_TOKENS,
        num_places=fields.integer("position_embedding_size", 10_240),
        norms_heads=True,
        norms_values=True,
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
    check_keys(fields, _OF_GEMMA_4_UNIFIED, _GEMMA_4_UNIFIED_NOTES)
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
        norms_product=True,
        merging=Merging.MEAN,
        merger_eps=fields.number("rms_norm_eps", 1e-6),
        scales_means=False,
        most_tokens=GEMMA_4_TOKENS,
        num_places=fields.integer("mm_posemb_size", 1120),
        places_first=True,
        reads_colours_last=True,
    )


TOWERS: Mapping[str, TowerFamily] = {
    **QWEN_TOWERS,
    **GLM_TOWERS,
    "internvl": INTERNVL_TOWER,
    "paddleocr_vl": PADDLEOCR_VL_TOWER,
    "mistral3": TowerFamily(_PIXTRAL_NAMES, _read_pixtral),
    "llava": TowerFamily(_LLAVA_NAMES, _read_llava),
    "gemma3": TowerFamily(_SIGLIP_NAMES, _read_siglip),
    "gemma4": TowerFamily(_GEMMA_4_NAMES, _read_gemma_4),
    "gemma4_unified": TowerFamily(_GEMMA_4_UNIFIED_NAMES, _read_gemma_4_unified),
}
