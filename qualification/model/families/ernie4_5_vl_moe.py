"""The text part of ERNIE 4.5 VL: ERNIE 4.5's experts, beside which a layer has others for the tokens of images.

Both have a router each, and as many experts, of another width; text visits those of text alone. Positions of images
have three parts, whose shares of a head's dimensions files give; those of text are the same in all three.

Files of `ernie4_5_moe_vl`, as first published, have the text's fields beside `vision_config`, and lists of two for text
and images. Sources: the class of transformers 5.24; the class of those files, and vLLM's of it.
"""

from dataclasses import replace
from functools import partial

from qualification.model.config import ExpertsConfig, FeedForward, ModelConfig
from qualification.model.families.ernie4_5 import REFUSED, THETA
from qualification.model.families.ernie4_5_moe import EXPERTS, NOT_READ, TENSORS, read_ernie_experts
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures, read_mixtures_by_kind
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_num_layers

FIRST_PUBLISHED = "ernie4_5_moe_vl"
_NUM_EXPERTS, _WIDTHS, _NUM_SHARED = "moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts"
_FIRST, _LAST, _INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
# Of which the class of the files as first published has another number, or none, where they are missing.
_REQUIRED = "num_key_value_heads", "rms_norm_eps", "rope_theta", "moe_k", _WIDTHS, _NUM_EXPERTS, _FIRST, _INTERVAL


def read_config(fields: Fields) -> ModelConfig:
    is_first = fields.given("model_type") == FIRST_PUBLISHED
    if is_first:
        fields = _as_saved_since(fields)
    else:
        fields = fields.where_absent(num_key_value_heads=4)  # null is as many as heads
    return read_like_llama(
        fields.or_else(rope_theta=THETA),
        "ernie4_5_vl_moe_text",
        norm_eps=1e-5,
        feed_forwards=_read_by_range
        if is_first
        else partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=1),
        tie_embeddings=not is_first,
    )


def _as_saved_since(fields: Fields) -> Fields:
    """Return the fields of a file as first published, with one number where text and images have as many."""
    for name in _REQUIRED:
        if not fields.has(name):
            fields.refuse(name, f"given where model_type is {FIRST_PUBLISHED}")
    counts = fields.integers(_NUM_EXPERTS, 2, 0)
    if counts[0] != counts[1]:
        fields.refuse(_NUM_EXPERTS, "as many for text as for images")
    return fields.changed(**{_NUM_EXPERTS: counts[0], _NUM_SHARED: fields.given(_NUM_SHARED) or 0})


def _read_by_range(fields: Fields) -> tuple[FeedForward, ...]:
    """Read those of a file as first published: experts from one layer to another, for text and images the same."""
    last = read_num_layers(fields) - 1
    firsts = fields.integers(_FIRST, 2, 0)
    lasts = (last, last) if fields.given(_LAST) in (None, -1) else fields.integers(_LAST, 2, last)
    if firsts[0] != firsts[1]:
        fields.refuse(_FIRST, "the same for text and for images")
    if min(lasts) < last and lasts[0] != lasts[1]:
        fields.refuse(_LAST, f"the same for text and for images, or {last} and above, behind the last layer")
    interval = fields.integer(_INTERVAL)
    return read_mixtures(
        fields, _read_experts, lambda layer: firsts[0] <= layer <= lasts[0] and (layer + 1) % interval == 0
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    width, _ = fields.integers(_WIDTHS, 2, 0) if fields.has(_WIDTHS) else (1536, 512)
    return read_ernie_experts(fields, width)


KEYS = family_keys(
    f"{_WIDTHS} {_NUM_EXPERTS} {_NUM_SHARED} moe_k {KINDS} {_FIRST} {_LAST} {_INTERVAL}",
    # Also of files as first published: of training, of other parts, and shares of positions, which text has once.
    without_effect="output_router_logits router_aux_loss_coef moe_capacity moe_gate moe_use_aux_free "
    "num_nextn_predict_layers rope_3d freq_allocation moe_aux_loss_lambda moe_z_loss_lambda moe_orthogonal_loss_lambda "
    "moe_group moe_group_orthogonal_loss moe_reverse_token_drop moe_dropout_prob moe_all_to_all_dropout "
    "moe_dense_experts_token_type_id moe_multimodal_dispatch_use_allgather sinkhorn_2gate sinkhorn_temp "
    "use_flash_attention use_sparse_flash_attn use_var_len_flash_attn fuse_rope fuse_ln fuse_rms_norm fuse_swiglu "
    "fuse_linear fuse_attn_ffn fuse_gate_detach_matmul fuse_softmax_mask recompute recompute_granularity "
    "weight_share_add_bias attention_probs_dropout_prob hidden_dropout_prob ignored_index tensor_parallel_degree "
    "token_balance_loss token_balance_seqlen",
    refused={
        **REFUSED,
        "use_bias": (False, None),
        "use_rmsnorm": (True, None),
        "moe_norm_min": (1e-12,),  # weights of the chosen experts are divided by their sum, or by this
        "num_experts": (None,),  # other names of moe_num_experts and moe_k, which its class reads too
        "num_experts_per_tok": (None,),
        "moe_gate_act": ("softmax", None),
        "moe_norm_gate_logits": (True, None),
        "moe_use_hard_gate": (True, None),  # a token's kind says which of the two routers it has
        "moe_group_experts": (False, None),
        "moe_fuse_experts": (False, None),
        "moe_use_token_type_bias": (False, None),
        "moe_num_attn_experts": (False, None),
    },
)
ERNIE4_5_VL_MOE_TEXT = Family(
    "ernie4_5_vl_moe_text",
    (),
    read_config,
    KEYS,
    replace(TENSORS, experts=replace(EXPERTS, has_image_experts=True)),
    not_read=NOT_READ,
)
