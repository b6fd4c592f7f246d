"""OLMo 3: an OLMo 2 with a window in three layers of four, whose rotation is never stretched."""

from functools import partial

from qualification.model.config import ModelConfig, NormsConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_full_rope, read_windowed_rope
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, read_periodic_windows

_PERIOD = 4  # one full layer after three with a window
_THETA = 500_000.0  # as its class has it, in layers with a window whatever rope_theta says


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "olmo3",
        norm_eps=1e-5,
        norms=NormsConfig(before=False, after=True),
        qk_norm=QKNorm.ALL_HEADS,
        attention_bias=has_bias,
        output_bias=has_bias,
        windows=partial(read_periodic_windows, missing=WINDOW, period=_PERIOD),
        rope=partial(read_full_rope, theta=_THETA),
        local_rope=partial(read_windowed_rope, theta=_THETA),
    )


OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), read_config, family_keys("attention_bias sliding_window layer_types"))
