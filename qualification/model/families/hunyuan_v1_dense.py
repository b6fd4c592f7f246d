"""Hunyuan, dense (0.5B to 7B, Hy-MT2): a Llama whose queries and keys are normed once they are rotated.

Its rotation is stretched by a larger base: files call that "dynamic", and give an alpha that makes it the same for
every length. The text of HunyuanOCR is the same; positions of images have parts, whose shares of a head's dimensions
are given beside alpha (`xdrope`), and those of text are the same in all parts.
"""

from collections.abc import Mapping
from functools import partial

from qualification.model.config import ModelConfig, QKNorm, RopeConfig, RopeKind
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import THETA, rope_of, rope_section
from qualification.model.shared import read_like_llama, unscaled_ropes

Q_NORM, K_NORM = "self_attn.query_layernorm", "self_attn.key_layernorm"
_BY_ALPHA = "dynamic", "xdrope"
_OF_IMAGES = "hunyuan_vl_text"


def read_config(fields: Fields, family: str = "hunyuan_v1_dense") -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        family,
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD_ROTATED,
        rope=read_hunyuan_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        tie_embeddings=family == _OF_IMAGES,
    )


def read_hunyuan_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """The rotation of Hunyuan's families. Raises ModelConfigError."""
    own = fields.integer("attention_head_dim", head_dim)
    if own != head_dim:
        fields.refuse("attention_head_dim", f"head_dim ({head_dim})")
    rope = rope_section(fields)
    if rope is None or rope.given("rope_type" if rope.has("rope_type") else "type") not in _BY_ALPHA:
        return unscaled_ropes(fields, head_dim)
    if head_dim == 2:
        fields.refuse("head_dim", "above 2 where the rotation has an alpha")
    base = rope.number("rope_theta", fields.number("rope_theta", THETA))
    theta = base * rope.number("alpha") ** (head_dim / (head_dim - 2))
    return rope_of(fields, rope, (RopeKind.PLAIN,), theta, head_dim=head_dim, plain_aliases=_BY_ALPHA)


READ = "attention_bias attention_head_dim"
# Notes on vocabularies, classifiers and images; shares of keys and values among layers, where they are not used.
WITHOUT_EFFECT = (
    "eod_token_id im_start_id im_end_id im_newline_id text_start_id text_end_id mask_init_id org_vocab_size pad_id "
    "add_classification_head class_num pool_type dense_list skip_cls_token cla_share_factor"
)
REFUSED: Mapping[str, tuple[object, ...]] = {
    "mlp_bias": (False, None),
    "norm_type": ("rms", "hf_rms", None),
    "use_qk_norm": (True,),
    "use_cla": (False, None),
    "use_rotary_pos_emb": (True,),
}
KEYS = family_keys(READ, without_effect=WITHOUT_EFFECT, refused=REFUSED)
HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    ("HunYuanDenseV1ForCausalLM",),
    read_config,
    KEYS,
    TensorNames(q_norm=Q_NORM, k_norm=K_NORM),
)
HUNYUAN_VL_TEXT = Family(
    _OF_IMAGES, (), partial(read_config, family=_OF_IMAGES), KEYS, TensorNames(q_norm=Q_NORM, k_norm=K_NORM)
)
