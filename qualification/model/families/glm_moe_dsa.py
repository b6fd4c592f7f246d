"""GLM 5, 5.1 and 5.2: DeepSeek V3.2's layers, some of which read the choice of an earlier layer's indexer.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from qualification.model.config import ModelConfig
from qualification.model.families.deepseek_v3 import MIXTURE_REFUSED
from qualification.model.families.family import Family
from qualification.model.families.indexed import INDEXED_READ, read_indexed
from qualification.model.families.latent import REFUSED, TENSORS, WITHOUT_EFFECT
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes

_SIZES = LatentSizes(latent=512, rotated=64, plain=192, value=256, query_latent=2048)
_TYPES, _PATTERN, _PERIOD, _OFFSET = (
    "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
)  # fmt: skip
_OWN, _SHARED = "full", "shared"
_LETTERS = {"F": _OWN, "S": _SHARED}


def read_config(fields: Fields) -> ModelConfig:
    return read_indexed(
        fields.or_else(n_group=1, topk_group=1),
        "glm_moe_dsa",
        sizes=_SIZES,
        norm_eps=1e-5,
        num_index_heads=32,
        neighbours=True,
        is_own=_read_types,
    )


def _read_types(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have an indexer: by a list, a pattern of F and S, or a period. Raises ModelConfigError.

    The first layers up to the offset have one, and then each so many layers behind these.
    """
    name = _TYPES if fields.has(_TYPES) else _PATTERN
    if fields.has(name):
        given = fields.given(name)
        if name == _PATTERN and isinstance(given, str):
            fields = fields.changed(**{name: [_LETTERS.get(letter, letter) for letter in given]})
        kinds = fields.choices(name, (_OWN, _SHARED), num_layers)
    else:
        period, offset = fields.count(_PERIOD, 1), fields.count(_OFFSET, 2)
        behind = (max(layer - offset + 1, 0) for layer in range(num_layers))
        kinds = tuple(_OWN if it % max(period, 1) == 0 else _SHARED for it in behind)
    if kinds[0] != _OWN:
        fields.refuse(name, f"{_OWN!r} of the first layer, which has no earlier one whose choice it could read")
    return tuple(kind == _OWN for kind in kinds)


KEYS = family_keys(
    f"{INDEXED_READ} {_TYPES} {_PATTERN} {_PERIOD} {_OFFSET}",
    without_effect=f"{WITHOUT_EFFECT} index_share_for_mtp_iteration",
    refused={
        **REFUSED,
        **MIXTURE_REFUSED,
        "mlp_bias": (False, None),
        "indexer_rope_interleave": (True, None),
        "moe_router_dtype": ("float32", None),
    },
)
GLM_MOE_DSA = Family("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
