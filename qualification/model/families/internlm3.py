"""InternLM 3: a Llama. Its rotation is "dynamic", which is the plain one up to max_position_embeddings."""

from functools import partial

from qualification.model.config import ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_rope
from qualification.model.shared import read_dense, read_like_llama

_OF_ATTENTION, _OF_ALL = ("qkv_bias", "attention_bias"), ("bias", "mlp_bias")  # as published, and as transformers saves
_KINDS = RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 128_512,
    "hidden_size": 4096,
    "intermediate_size": 10_240,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING).where_absent(num_key_value_heads=2, head_dim=128)
    has_bias = _read_bias(fields)
    return read_like_llama(
        fields,
        "internlm3",
        norm_eps=1e-5,
        rope=read_dynamic_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_dense, has_bias=has_bias),
    )


def _read_bias(fields: Fields) -> bool:
    """Return whether all products of layers have biases; no class has those of some alone. Raises ModelConfigError."""
    given = {name: fields.flag(name, False) for name in (*_OF_ATTENTION, *_OF_ALL) if fields.has(name)}
    of_attention, of_all = (any(given.get(name, False) for name in names) for names in (_OF_ATTENTION, _OF_ALL))
    for name, has_bias in given.items():
        if has_bias != of_attention or has_bias != of_all:
            fields.refuse(name, "the same as qkv_bias, attention_bias, bias and mlp_bias, as far as these are given")
    if of_attention != of_all:
        fields.refuse(next(iter(given)), "the same as qkv_bias and bias, which are false where they are missing")
    return of_all


def read_dynamic_rope(fields: Fields, head_dim: int, *, kinds: tuple[RopeKind, ...] = _KINDS) -> RopeConfig:
    """Read a rotation whose base may grow with contexts beyond max_position_embeddings, and with no others.

    kinds  of other rotations that the family has
    """
    return read_rope(fields, kinds, head_dim=head_dim, plain_aliases=("dynamic",))


KEYS = family_keys(" ".join((*_OF_ATTENTION, *_OF_ALL)))
INTERNLM3 = Family("internlm3", ("InternLM3ForCausalLM", "LlamaForCausalLM"), read_config, KEYS)
