"""What config.json says in the same words for every Llama-like family."""

from server.model.config import ModelConfig, RopeKind
from server.model.families.fields import Fields
from server.model.families.rope_fields import read_rope

_MAX_LAYERS = 10_000


def read_shared(
    fields: Fields, model_type: str, *, norm_eps: float = 1e-6, rope_kinds: tuple[RopeKind, ...] = tuple(RopeKind)
) -> ModelConfig:
    """A model without biases, norms of heads and windows, which a family adds. Raises ModelError.

    norm_eps    where the field is missing, as the family's class in transformers has it
    rope_kinds  the rotary embeddings that the family knows; others are refused by name
    """
    fields.choice("hidden_act", ("silu",), "silu")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    num_layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    vocab_size = fields.integer("vocab_size")
    hidden_size = fields.integer("hidden_size")
    return ModelConfig(
        family=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        rope=read_rope(fields, rope_kinds),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * num_layers,
        softcap=None,
        sinks=False,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        dtype=_dtype(fields),
    )


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"  # its older name
    return fields.choice(name, ("bfloat16", "float16", "float32"), "float32")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads and not fields.has("head_dim"):
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is absent")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse("head_dim", f"even for the rotary embedding (it is {head_dim})")
    return head_dim
