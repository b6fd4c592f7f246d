"""InternLM 2 and 2.5: a Llama with names of its own, whose queries, keys and values are one tensor, in groups.

A group has the queries that read a KV head, then that head's key, then its value. The rotation of most files is
"dynamic", which is the plain one up to max_position_embeddings.
"""

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.internlm3 import read_dynamic_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import check_head_size, read_like_llama

# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 103_168,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields, has_bias = fields.or_else(**_MISSING), fields.flag("bias", True)  # of its attention alone
    model = read_like_llama(
        fields,
        "internlm2",
        norm_eps=1e-6,
        rope=read_dynamic_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
    )
    check_head_size(fields, model)
    return model


KEYS = family_keys("bias")
TENSORS = TensorNames(
    qkv="wqkv",
    qkv_is_by_head=True,
    attention="attention",
    attention_output="attention.wo",
    before_attention="attention_norm",
    before_feed_forward="ffn_norm",
    feed_forward="feed_forward",
    dense=("w1", "w3", "w2"),
)
_RENAMED = {"model.tok_embeddings.": "model.embed_tokens.", "output.": "lm_head."}
INTERNLM2 = Family("internlm2", ("InternLM2ForCausalLM",), read_config, KEYS, TENSORS, renamed=_RENAMED)
