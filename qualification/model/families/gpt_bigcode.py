"""GPT BigCode (StarCoder, SantaCoder): a GPT-2 of ordinary products, whose queries all read one head of keys."""

from dataclasses import replace

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.families.gpt2 import READ, RENAMED, TENSORS, TOLERATED, WITHOUT_EFFECT, read_like_gpt2
from qualification.model.fields import Fields
from qualification.model.keys import family_keys

_ONE_HEAD = "multi_query"


def read_config(fields: Fields) -> ModelConfig:
    num_kv_heads = 1 if fields.flag(_ONE_HEAD, True) else None
    return read_like_gpt2(fields, "gpt_bigcode", missing="gelu_pytorch_tanh", num_kv_heads=num_kv_heads)


KEYS = family_keys(
    f"{READ} {_ONE_HEAD}",
    without_effect=f"{WITHOUT_EFFECT} attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner "
    "max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache validate_runner_input",
    refused={"quantization_config": (None,)},
)
NAMES = replace(TENSORS, products_are_turned=False, qkv_is_by_head=True)
GPT_BIGCODE = Family(
    "gpt_bigcode", ("GPTBigCodeForCausalLM",), read_config, KEYS, NAMES, tolerated=TOLERATED, renamed=RENAMED
)
