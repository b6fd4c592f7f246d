"""The towers of GLM 4.1V, 4.5V, 4.6V and GLM-OCR, from config.json: one product makes a token of 2 x 2 patches."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.families.qwen_towers import in_sections
from qualification.model.families.tower_family import AXIAL_THETA, TowerFamily, TowerSource, check_keys
from qualification.model.tower import Interpolation, Merging, TowerConfig, TowerNames

_KEYS = (
    "depth hidden_size hidden_act attention_bias num_heads in_channels image_size patch_size rms_norm_eps "
    "spatial_merge_size temporal_patch_size out_hidden_size intermediate_size rope_parameters"
)
_NOTES = "hidden_dropout_prob"
_SECTIONS = (8, 12, 12)  # of a head's pairs, where a file names none
_LAYER_NORM_EPS = 1e-5  # of torch's class
_OCR_NAMES = TowerNames(
    parts=("visual.",),
    patches="visual.patch_embed.proj",
    layer="visual.blocks.{}",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    q_norm="attn.q_norm",
    k_norm="attn.k_norm",
    output="attn.proj",
    feed_forward_norm="norm2",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    last_norm="visual.post_layernorm",
    downsample="visual.downsample",
    merger="visual.merger",
    first="proj",
    merger_norm="post_projection_norm",
    merger_up=("gate_proj", "up_proj"),
    second="down_proj",
)
_NAMES = replace(
    _OCR_NAMES,
    product_norm="visual.post_conv_layernorm",
    positions="visual.embeddings.position_embedding.weight",
    q_norm="",
    k_norm="",
)


def _read(source: TowerSource) -> TowerConfig:
    """Read that of GLM 4.1V to 4.6V: patches are normed and placed, and layers are as wide as the text."""
    fields = source.vision
    common = _common(source, hidden=1536, heads=12)
    if fields.flag("attention_bias", False):
        fields.refuse("attention_bias", "false: the layers' other products have no biases")
    image = fields.integers("image_size", 2, 336)
    side = image[0] // common.patch_size
    if image[0] != image[1] or side < 2:
        fields.refuse("image_size", f"one size of both sides, of at least 2 patches ({2 * common.patch_size} pixels)")
    return replace(
        common,
        names=_NAMES,
        width=common.out_size,
        has_biases=False,
        norms_product=True,
        num_positions=side,
        interpolation=Interpolation.CUBIC,
        merger_width=fields.integer("intermediate_size", 13_696),
    )


def _read_ocr(source: TowerSource) -> TowerConfig:
    """Read that of GLM-OCR: heads are normed, and patches are placed by their rotation alone."""
    common = _common(source, hidden=1024, heads=16)
    return replace(
        common,
        width=source.vision.integer("intermediate_size", 4096),
        has_biases=source.vision.flag("attention_bias", True),
        norms_heads=True,
        merger_width=3 * common.out_size,
    )


def _common(source: TowerSource, *, hidden: int, heads: int) -> TowerConfig:
    """Return what both have in common, with what their classes have where a field is missing."""
    fields = source.vision
    check_keys(fields, _KEYS, _NOTES)
    sides, frames = fields.integers("patch_size", 2, 14), fields.integers("temporal_patch_size", 1, 2)
    if sides[0] != sides[1]:
        fields.refuse("patch_size", "one size of both sides")
    if fields.integer("in_channels", 3) != 3:
        fields.refuse("in_channels", "3, red, green and blue")
    hidden, heads = fields.integer("hidden_size", hidden), fields.integer("num_heads", heads)
    if hidden % heads or hidden // heads % 4:
        fields.refuse("num_heads", f"a divisor of hidden_size ({hidden}) with heads of a multiple of 4 numbers")
    out = source.text.hidden_size
    if fields.has("out_hidden_size") and fields.integer("out_hidden_size") != out:
        fields.refuse("out_hidden_size", f"{out}, the hidden_size of the text")
    rope = fields.or_else(rope_parameters={}).section("rope_parameters")
    assert rope is not None, "a missing section is empty"
    rope.choice("rope_type", ("axial", "default"), "axial")
    return TowerConfig(
        num_layers=fields.integer("depth", 24),
        hidden_size=hidden,
        num_heads=heads,
        width=0,
        activation=Activation(fields.choice("hidden_act", (Activation.SILU.value,), Activation.SILU.value)),
        is_gated=True,
        has_rms_norms=True,
        patch_size=sides[0],
        num_frames=frames[0],
        merge=fields.integer("spatial_merge_size", 2),
        out_size=out,
        names=_OCR_NAMES,
        merger_has_biases=False,
        rope_theta=rope.number("rope_theta", AXIAL_THETA),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        merging=Merging.GATED,
        merger_eps=_LAYER_NORM_EPS,
    )


_IN_SECTIONS = partial(in_sections, missing=_SECTIONS)
_GLM = TowerFamily(_NAMES, _read, _IN_SECTIONS)
GLM_TOWERS: Mapping[str, TowerFamily] = {
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glm_ocr": TowerFamily(_OCR_NAMES, _read_ocr, _IN_SECTIONS),
}
