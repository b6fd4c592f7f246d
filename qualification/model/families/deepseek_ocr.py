"""The text part of DeepSeek-OCR and DeepSeek-OCR 2: the experts of DeepSeek V2 behind attention by heads, as Llama's.

Published files (`deepseek_vl_v2`) name the class of DeepSeek V2, whose latents `use_mla` turns off. Sources: the class
of DeepSeek-OCR 2 in transformers 5.24, the published config of DeepSeek-OCR and the names of its tensors.
"""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.deepseek_v2 import read_v2_experts
from qualification.model.families.deepseek_v3 import MIXTURE
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.families.latent import WITHOUT_EFFECT
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_behind, read_mixtures_by_kind
from qualification.model.shared import check_head_size, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    of_layers = read_mixtures_by_kind if fields.has(KINDS) else read_mixtures_behind
    model = read_like_llama(
        fields,
        "deepseek_ocr2_text",
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=partial(of_layers, read_experts=read_v2_experts, num_dense_missing=0),
    )
    check_head_size(fields, model)
    return model


KEYS = family_keys(
    f"attention_bias {MIXTURE} {KINDS} topk_method",
    without_effect=f"{WITHOUT_EFFECT} qk_rope_head_dim qk_nope_head_dim v_head_dim",  # of latents, which it has not
    refused={
        "use_mla": (False, None),
        "kv_lora_rank": (None,),
        "q_lora_rank": (None,),
        "mlp_bias": (False, None),
        "scoring_func": ("softmax", None),
        "moe_layer_freq": (1, None),
        "lm_head": (True, None),
        "rm_head": (False, None),
        "num_experts": (None,),  # another name of n_routed_experts, which its class reads too
        # Unlimited-OCR's: an answer's tokens see its prompt and their last neighbours.
        "sliding_window": (None,),
        "sliding_window_size": (None,),
        "layer_types": (None,),
    },
)
DEEPSEEK_OCR2_TEXT = Family(
    "deepseek_ocr2_text",
    (),
    read_config,
    KEYS,
    TensorNames(experts=ExpertNames(shared="mlp.shared_experts", router_is_plain=True)),
)
