"""GLM-4, dense (9B and 32B of April 2025): norms before and after, and half of each head rotated, by neighbours."""

from qualification.model.config import ModelConfig, NormsConfig, RopeConfig
from qualification.model.families.family import GATE_UP, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_rope
from qualification.model.shared import read_like_llama

TENSORS = TensorNames(
    dense_joined=GATE_UP,
    neighbours_are_pairs=True,
    after_attention="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)
SHARE = "partial_rotary_factor"


def read_config(fields: Fields) -> ModelConfig:
    return read_half_rotated(fields, "glm4", NormsConfig(before=True, after=True))


def read_half_rotated(fields: Fields, family: str, norms: NormsConfig | None = None) -> ModelConfig:
    """Read one of the families whose classes rotate half of each head where nothing else is said."""
    return read_like_llama(
        fields.where_absent(**{SHARE: 0.5}).or_else(head_dim=128),
        family,
        norm_eps=1.5625e-7,
        norms=norms,
        rope=read_paired_rope,
        attention_bias=fields.flag("attention_bias", True),
    )


def read_paired_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the rotation of a share of each head. Raises ModelConfigError where that is no whole pairs."""
    rope = read_rope(fields, head_dim=head_dim, is_partial=True)
    if (size := rope.rotated_dims(head_dim)) % 2:
        fields.refuse(SHARE, f"a share of head_dim ({head_dim}) that is whole pairs of dimensions (it is {size})")
    return rope


# Products of 8 bits have one scale for many rows, whose order is another in memory.
KEYS = family_keys("attention_bias", refused={"quantization_config": (None,)})
GLM4 = Family("glm4", ("Glm4ForCausalLM",), read_config, KEYS, TENSORS)
