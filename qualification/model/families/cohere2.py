"""Cohere 2 (Command R7B, Command A): attention and feed-forward read one LayerNorm, whose results are added together.

Three layers of four have a window; the others rotate nothing, hence see no positions.
"""

from dataclasses import replace
from functools import partial

from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama, without_rotation
from qualification.model.windows import WINDOW, read_patterned_windows

PARALLEL = NormsConfig(is_shared=True)
_PERIOD = 4  # one full layer after three with a window
_read_windows = partial(read_patterned_windows, missing=WINDOW, pattern=_PERIOD)


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "cohere2",
        norms=PARALLEL,
        windows=_read_windows,
        attention_bias=has_bias,
        output_bias=has_bias,
        tie_embeddings=True,
    )
    full = frozenset(layer for layer, window in enumerate(_read_windows(fields)) if window is None)
    return replace(
        without_rotation(model, full),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norms_subtract_mean=True,
        logits_divisor=1 / fields.number("logit_scale", 0.0625),
    )


WITHOUT_EFFECT = "layer_switch use_embedding_sharing use_parallel_embedding"
REFUSED: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),  # products of 8 bits have one scale for rows whose order is another in memory
    # What its class does whatever these say.
    "order_of_interleaved_layers": ("local_attn_first", None),
    "position_embedding_type": ("rope_gptj", None),
    "rotary_pct": (1, 1.0, None),
    "use_gated_activation": (True, None),
    "use_parallel_block": (True, None),
    "use_qk_norm": (False, None),
}
KEYS = family_keys(
    "attention_bias layer_norm_eps logit_scale sliding_window sliding_window_pattern layer_types",
    without_effect=WITHOUT_EFFECT,
    refused=REFUSED,
)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM",), read_config, KEYS, TensorNames(neighbours_are_pairs=True))
