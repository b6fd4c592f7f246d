"""The towers of InternVL 3 and 3.5 in their Hugging Face form, from config.json: InternViT over squares of an image."""

import math

from kernels.fused.activation_kind import Activation
from qualification.model.families.tower_family import TowerFamily, TowerSource, check_keys, num_read_layers
from qualification.model.fields import Fields
from qualification.model.shared import read_activation
from qualification.model.tower import TowerConfig, TowerNames

_KEYS = (
    "hidden_size num_hidden_layers num_attention_heads attention_bias use_qk_norm intermediate_size hidden_act "
    "norm_type layer_norm_eps image_size patch_size num_channels use_mask_token use_absolute_position_embeddings "
    "use_mean_pooling"
)
_NOTES = "dropout hidden_dropout_prob projection_dropout drop_path_rate initializer_factor layer_scale_init_value"
_HEADS_EPS = 1e-6  # of the norm of queries and keys, which its class fixes
_LAYER_NORM_EPS = 1e-5  # of torch's class
_NAMES = TowerNames(
    parts=("vision_tower.", "multi_modal_projector."),
    patches="vision_tower.embeddings.patch_embeddings.projection",
    class_token="vision_tower.embeddings.cls_token",
    positions="vision_tower.embeddings.position_embeddings",
    layer="vision_tower.encoder.layer.{}",
    attention_norm="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
    output="attention.projection_layer",
    attention_scale="lambda_1",
    feed_forward_norm="layernorm_after",
    up=("mlp.fc1",),
    down="mlp.fc2",
    feed_forward_scale="lambda_2",
    merger="multi_modal_projector",
    merger_norm="layer_norm",
    first="linear_1",
    second="linear_2",
)


def _read(source: TowerSource) -> TowerConfig:
    """Read that of InternViT-300M (LayerNorms) or 6B (RMSNorms, normed heads), and the projector behind it."""
    fields, whole = source.vision, source.whole
    check_keys(fields, _KEYS, _NOTES)
    patch, side = _sides(fields)
    hidden, heads = fields.integer("hidden_size", 1024), fields.integer("num_attention_heads", 16)
    if hidden % heads:
        fields.refuse("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    for name, missing, due in (
        ("use_mask_token", False, False),
        ("use_absolute_position_embeddings", True, True),
        ("use_mean_pooling", True, True),
    ):
        if fields.flag(name, missing) is not due:
            fields.refuse(name, f"{str(due).lower()}: no published tower has another")
    norms_heads, eps = fields.flag("use_qk_norm", False), fields.number("layer_norm_eps", 1e-6)
    if norms_heads and eps != _HEADS_EPS:
        fields.refuse("layer_norm_eps", f"{_HEADS_EPS}, as queries and keys have it")
    merge = _merge(whole, side)
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    whole.choice("projector_hidden_act", (Activation.GELU.value,), Activation.GELU.value)
    text_size = source.text.hidden_size
    return TowerConfig(
        num_layers=num_read_layers(whole, fields.integer("num_hidden_layers", 24)),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 4096),
        activation=read_activation(
            fields.or_else(hidden_act="gelu"), activations=(Activation.GELU, Activation.GELU_TANH)
        ),
        is_gated=False,
        patch_size=patch,
        num_frames=1,
        merge=merge,
        out_size=text_size,
        names=_NAMES,
        has_qkv_bias=fields.flag("attention_bias", False),
        has_rms_norms=fields.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm",
        window=side // merge,
        num_positions=side,
        has_class_token=True,
        rope_theta=None,
        norm_eps=eps,
        norms_heads=norms_heads,
        norms_heads_together=norms_heads,
        scales_residuals=True,
        merger_eps=_LAYER_NORM_EPS,
        merger_width=text_size,
        merger_norms_tokens=True,
        merger_has_layer_norm=True,
        image_side=side,
        is_tiled=True,
    )


def _sides(fields: Fields) -> tuple[int, int]:
    """Return the pixels of a side of a patch, and the patches of a side of a square."""
    patches, images = fields.integers("patch_size", 2, 14), fields.integers("image_size", 2, 448)
    for name, sides in (("patch_size", patches), ("image_size", images)):
        if sides[0] != sides[1]:
            fields.refuse(name, "one size of both sides")
    if fields.integer("num_channels", 3) != 3:
        fields.refuse("num_channels", "3, red, green and blue")
    if images[0] % patches[0]:
        fields.refuse("image_size", f"a multiple of patch_size ({patches[0]})")
    return patches[0], images[0] // patches[0]


def _merge(whole: Fields, side: int) -> int:
    """Return the patches of a side of a token."""
    ratio = whole.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio <= 1 else 0
    if not merge or not math.isclose(merge * ratio, 1) or side % merge:
        whole.refuse("downsample_ratio", f"1 by a divisor of the {side} patches of a square's side")
    if whole.integer("image_seq_length", 256) != (due := (side // merge) ** 2):
        whole.refuse("image_seq_length", f"{due}, the tokens of {side} x {side} patches")
    return merge


INTERNVL_TOWER = TowerFamily(_NAMES, _read)
