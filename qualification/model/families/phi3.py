"""Phi-3, 3.5 and 4-mini: a Llama whose checkpoint holds merged matrices.

The models of 4k context have a window (2047), those of 128k LongRoPE, and Phi-4-mini rotates three quarters of a head.
"""

from functools import partial

from qualification.model.config import ModelConfig, RopeKind
from qualification.model.families.family import GATE_UP, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_rope
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_uniform_windows

# The first files of LongRoPE call it so; what they mean by yarn is LongRoPE too, says Phi3Config.
_ALIASES = ("su", "yarn")


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(original_max_position_embeddings=4096),  # as its class has it, whatever rope_scaling says
        "phi3",
        norm_eps=1e-5,
        windows=partial(read_uniform_windows, missing=None),
        rope=lambda it, head_dim: read_rope(
            it, (RopeKind.PLAIN, RopeKind.LONGROPE), head_dim=head_dim, aliases=_ALIASES, is_partial=True
        ),
    )


KEYS = family_keys(
    "sliding_window layer_types",
    without_effect="embd_pdrop resid_pdrop full_attn_mod interpolate_factor",
    refused={"attention_bias": (False, None), "mlp_bias": (False, None), "lm_head_bias": (False, None)},
)
PHI3 = Family("phi3", ("Phi3ForCausalLM",), read_config, KEYS, TensorNames(qkv="qkv_proj", dense_joined=GATE_UP))
