"""Fields of config.json of families with latent attention: DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash, Mistral 4."""

import math
from collections.abc import Callable
from dataclasses import replace

from qualification.model.config import FeedForward, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import ExpertNames, TensorNames
from qualification.model.fields import Fields
from qualification.model.latent import LatentAttentionConfig, LatentSizes
from qualification.model.rope import read_rope, rope_section
from qualification.model.shared import read_like_llama

TENSORS = TensorNames(neighbours_are_pairs=True, experts=ExpertNames(shared="mlp.shared_experts", router_is_plain=True))
_ROPES = (RopeKind.PLAIN, RopeKind.YARN)
_MSCALE_OF_ALL = "mscale_all_dim"


def read_latent(
    fields: Fields,
    family: str,
    *,
    sizes: LatentSizes,
    norm_eps: float,
    feed_forwards: Callable[[Fields], tuple[FeedForward, ...]],
    rope: Callable[[Fields, int], RopeConfig] | None = None,
) -> ModelConfig:
    """Read a model whose layers attend by latents. Raises ModelConfigError.

    sizes  where fields are missing, as the family's class has them; a query latent of null is none
    rope   of fields and numbers that are rotated; None: as config.json says
    """
    num_heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        fields.refuse("num_key_value_heads", f"num_attention_heads ({num_heads}): all heads share one latent")
    found = LatentSizes(
        latent=fields.integer("kv_lora_rank", sizes.latent),
        rotated=fields.integer("qk_rope_head_dim", sizes.rotated),
        plain=fields.integer("qk_nope_head_dim", sizes.plain),
        value=fields.integer("v_head_dim", sizes.value),
        query_latent=fields.integer_or_none("q_lora_rank", sizes.query_latent),
    )
    if found.rotated % 2:
        fields.refuse("qk_rope_head_dim", f"even for the rotary embedding (it is {found.rotated})")
    model = read_like_llama(
        fields.changed(head_dim=found.rotated, num_key_value_heads=num_heads),
        family,
        norm_eps=norm_eps,
        rope=rope or _read_rope,
        feed_forwards=feed_forwards,
    )
    scale = found.query**-0.5 * _scale_of_yarn(fields, model.attentions[0].rope)
    mixer = LatentAttentionConfig.of(found, num_heads, scale, model.attentions[0].rope)
    return replace(model, layers=tuple(replace(layer, mixer=mixer) for layer in model.layers))


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the rotation, which is of whole vectors of `head_dim`, whatever share of a query these are."""
    rope = rope_section(fields)
    whole = {"partial_rotary_factor": None}
    if rope is not None:
        values = {name: rope.given(name) for name in rope.names} | whole
        fields = fields.changed(rope_scaling=values, rope_parameters=None)
    return read_rope(fields.changed(**whole), _ROPES, head_dim=head_dim)


def _scale_of_yarn(fields: Fields, rope: RopeConfig) -> float:
    """Return what scores are multiplied by because of YaRN: a square, of queries and of keys."""
    section = rope_section(fields)
    if rope.kind is RopeKind.PLAIN or section is None or not section.given(_MSCALE_OF_ALL) or rope.factor <= 1:
        return 1.0
    return (0.1 * section.number(_MSCALE_OF_ALL) * math.log(rope.factor) + 1.0) ** 2


READ = "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
# Sums of the sizes, which newer files say again.
WITHOUT_EFFECT = (
    "qk_head_dim num_nextn_predict_layers num_mtp_layers ep_size seq_aux aux_loss_alpha output_router_logits"
)
REFUSED: dict[str, tuple[object, ...]] = {"attention_bias": (False, None), "rope_interleave": (True,)}
