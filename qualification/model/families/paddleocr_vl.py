"""PaddleOCR-VL: a text like ERNIE 4.5's, whose heads are turned in halves, and a SigLIP over images of any size.

Published files have the text's fields beside `vision_config`, and no `text_config`; both ways are read.
Source: the classes of transformers 5.24.
"""

from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.config import ModelConfig
from qualification.model.families.ernie4_5 import THETA
from qualification.model.families.family import Family
from qualification.model.families.qwen_towers import in_sections
from qualification.model.families.tower_family import AXIAL_THETA, TowerFamily, TowerSource, check_keys
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama
from qualification.model.tower import Interpolation, TowerConfig, TowerNames

_KEYS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size hidden_act "
    "layer_norm_eps spatial_merge_size rope_parameters"
)
_NOTES = "temporal_patch_size"  # its class reads one frame, whatever this says
_MERGER_EPS = 1e-5  # which its class fixes
_NAMES = TowerNames(
    parts=("visual.", "mlp_AR."),
    not_read=("visual.vision_model.head.", "visual.vision_model.embeddings.packing_position_embedding."),
    patches="visual.vision_model.embeddings.patch_embedding",
    positions="visual.vision_model.embeddings.position_embedding.weight",
    layer="visual.vision_model.encoder.layers.{}",
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    feed_forward_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
    last_norm="visual.vision_model.post_layernorm",
    merger="mlp_AR",
    merger_of_whole="projector",
    merger_norm="pre_norm",
    first="linear_1",
    second="linear_2",
)


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=2, head_dim=128)  # null is as many as heads, and their share
    has_bias = fields.flag("use_bias", False)
    return read_like_llama(
        fields.or_else(rope_theta=THETA),
        "paddleocr_vl_text",
        norm_eps=1e-5,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_dense, has_bias=has_bias),
        tie_embeddings=True,
    )


def _read_tower(source: TowerSource) -> TowerConfig:
    """Read that of its class, with what this has where a field is missing."""
    fields = source.vision
    # The second name is that of old files, in place of the tower's own.
    fields.choice("model_type", ("paddleocr_vl_vision", "paddleocr_vl"), "paddleocr_vl_vision")
    check_keys(fields, _KEYS, _NOTES)
    if fields.integer("num_channels", 3) != 3:
        fields.refuse("num_channels", "3, red, green and blue")
    hidden, heads = fields.integer("hidden_size", 1152), fields.integer("num_attention_heads", 16)
    if hidden % heads or hidden // heads % 4:
        fields.refuse(
            "num_attention_heads", f"a divisor of hidden_size ({hidden}) with heads of a multiple of 4 numbers"
        )
    patch, image = fields.integer("patch_size", 14), fields.integer("image_size", 384)
    if image < 2 * patch:
        fields.refuse("image_size", f"at least 2 patches ({2 * patch} pixels)")
    rope = fields.section("rope_parameters") or Fields({}, fields.source)
    rope.choice("rope_type", ("axial", "default"), "axial")
    return TowerConfig(
        num_layers=fields.integer("num_hidden_layers", 27),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", 4304),
        activation=Activation(fields.choice("hidden_act", (Activation.GELU_TANH.value,), Activation.GELU_TANH.value)),
        is_gated=False,
        patch_size=patch,
        num_frames=1,
        merge=fields.integer("spatial_merge_size", 2),
        out_size=source.text.hidden_size,
        names=_NAMES,
        num_positions=image // patch,
        interpolation=Interpolation.LINEAR,
        rope_theta=rope.number("rope_theta", AXIAL_THETA),
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        norms_last=True,
        merger_eps=_MERGER_EPS,
    )


KEYS = family_keys(
    "use_bias",
    # Of published files, which have one object for all: notes, and what its class does whatever they say.
    without_effect="weight_share_add_bias attention_probs_dropout_prob hidden_dropout_prob ignored_index "
    "use_flash_attention",
    refused={
        "compression_ratio": (1, 1.0, None),
        "use_3d_rope": (True, None),
        "rope_is_neox_style": (True, None),
        "sliding_window": (None,),
    },
)
PADDLEOCR_VL_TEXT = Family("paddleocr_vl_text", (), read_config, KEYS)
PADDLEOCR_VL_TOWER = TowerFamily(_NAMES, _read_tower, in_sections)
