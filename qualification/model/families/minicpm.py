"""MiniCPM and MiniCPM 4: a Llama whose embeddings, residuals and logits are scaled.

MiniCPM 4.1 attends to blocks that it chooses, which no path computes: `sparse_config` is refused.
"""

from functools import partial

from qualification.model.config import ModelConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.families.internlm3 import read_dynamic_rope
from qualification.model.families.minicpm3 import SCALES, with_scales
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import check_head_size, read_like_llama

_KINDS = RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LONGROPE
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def read_config(fields: Fields) -> ModelConfig:
    fields, has_bias = fields.or_else(**_MISSING), fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "minicpm",
        norm_eps=1e-6,
        rope=partial(read_dynamic_rope, kinds=_KINDS),
        attention_bias=has_bias,
        output_bias=has_bias,
    )
    check_head_size(fields, model)
    return with_scales(model, fields, embedding=1.0, depth=1.0, base=1.0)


KEYS = family_keys(
    f"attention_bias {SCALES}",
    without_effect="mup_denominator",
    refused={"sparse_config": (None,), "num_experts": (0, None)},
)
MINICPM = Family("minicpm", ("MiniCPMForCausalLM",), read_config, KEYS)
