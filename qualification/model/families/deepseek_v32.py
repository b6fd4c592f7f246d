"""DeepSeek V3.2 and V3.2-Exp: DeepSeek V3's layers, each of which attends to the keys that its indexer chooses.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from qualification.model.config import ModelConfig
from qualification.model.families.deepseek_v3 import MIXTURE_REFUSED, SIZES
from qualification.model.families.family import Family
from qualification.model.families.indexed import INDEXED_READ, read_indexed
from qualification.model.families.latent import REFUSED, TENSORS, WITHOUT_EFFECT
from qualification.model.fields import Fields
from qualification.model.keys import family_keys


def read_config(fields: Fields) -> ModelConfig:
    return read_indexed(
        fields,
        "deepseek_v32",
        sizes=SIZES,
        norm_eps=1e-6,
        num_index_heads=64,
        neighbours=False,
        is_own=lambda _, num_layers: (True,) * num_layers,
    )


KEYS = family_keys(
    INDEXED_READ,
    without_effect=WITHOUT_EFFECT,
    refused={
        **REFUSED,
        **MIXTURE_REFUSED,
        "mlp_bias": (False, None),
        "indexer_rope_interleave": (False, None),
    },
)
DEEPSEEK_V32 = Family("deepseek_v32", ("DeepseekV32ForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
