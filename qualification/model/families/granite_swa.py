"""Granite Swash, dense and with experts: a Granite with sinks, and a window in three layers of four.

Each layer may rotate by a base of its own, or not at all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from qualification.model.config import FeedForward, LayerConfig, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.families.granite import MULTIPLIERS, read_granite
from qualification.model.families.granitemoe import READ, SHARED_WIDTH, WITHOUT_EFFECT, read_granite_experts
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense
from qualification.model.windows import Windows, read_windows_of

_PERIOD, _WINDOW = 4, 128  # one full layer before three with a window, where its class has nothing else to read
_THETAS = "layer_rope_theta"


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=4)  # null is as many as heads
    feed_forward = partial(read_dense, has_bias=fields.flag("mlp_bias", False))
    return _read(fields.or_else(tie_word_embeddings=True), "granite_swa", feed_forward, norm_eps=1e-5)


def read_mixtures_config(fields: Fields) -> ModelConfig:
    feed_forward = partial(read_granite_experts, shared_width=fields.count(SHARED_WIDTH, 0))
    return _read(fields, "granitemoe_swa", feed_forward, norm_eps=1e-6)


def _read(
    fields: Fields, family: str, feed_forward: Callable[[Fields], FeedForward], *, norm_eps: float
) -> ModelConfig:
    model = read_granite(fields, family, feed_forward, norm_eps=norm_eps, windows=_read_windows, has_sinks=True)
    return _with_thetas(fields, model)


def _read_windows(fields: Fields) -> Windows:
    window = fields.integer_or_none("sliding_window", _WINDOW)
    return read_windows_of(fields, window, lambda layer: layer % _PERIOD != 0)


def _with_thetas(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Return the model with the base of each layer's rotation; of 0 the layer rotates nothing."""
    given = fields.given(_THETAS)
    if given is None:
        return model
    are_numbers = isinstance(given, list) and all(type(it) in (int, float) and (it == 0 or it > 1) for it in given)
    if not isinstance(given, list) or not are_numbers or len(given) != model.num_layers:
        fields.refuse(_THETAS, f"a list of {model.num_layers} numbers, each 0 or above 1")

    def changed(layer: LayerConfig, theta: float) -> LayerConfig:
        rope = layer.attention.rope
        own = replace(rope, theta=float(theta)) if theta else RopeConfig(rope.theta, RopeKind.NONE)
        return replace(layer, mixer=replace(layer.attention, rope=own))

    return replace(model, layers=tuple(map(changed, model.layers, given)))


_OWN = f"sliding_window layer_types {_THETAS}"
GRANITE_SWA = Family(
    "granite_swa",
    ("GraniteSWAForCausalLM",),
    read_config,
    family_keys(f"attention_bias mlp_bias {MULTIPLIERS} {_OWN}"),
)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    ("GraniteMoeSWAForCausalLM",),
    read_mixtures_config,
    family_keys(f"{READ} {SHARED_WIDTH} {_OWN}", without_effect=WITHOUT_EFFECT),
    TensorNames(
        experts=ExpertNames(
            "block_sparse_moe.router",
            "block_sparse_moe.experts",
            shared="shared_mlp",
            shared_gate_up="input_linear",
            shared_down="output_linear",
            layout=ExpertLayout.HALVES,
        )
    ),
)
