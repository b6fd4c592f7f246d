"""The sliding windows of a config.json's layers, by the rules and defaults of transformers' classes.

A window of w is the w latest positions, the token's own included: transformers' mask and our attention agree on this.
"""

from server.model.families.fields import Fields

WINDOW = 4096  # where sliding_window is missing (null means none): Qwen2Config, Qwen3Config, MistralConfig
_FIRST_LAYER = 28  # where max_window_layers is missing: Qwen2Config, Qwen3Config
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_uniform_windows(fields: Fields, num_layers: int, *, missing: int | None) -> tuple[int | None, ...]:
    """The same window, or none, in every layer; `missing` where the field is. Raises ModelError."""
    fields.absent("layer_types", "this family has one kind of layer")
    return (fields.integer_or_none("sliding_window", missing),) * num_layers


def read_switched_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's: none unless use_sliding_window; then by layer_types, or from layer max_window_layers on.

    Raises ModelError.
    """
    window = fields.integer_or_none("sliding_window", WINDOW) if fields.flag("use_sliding_window", False) else None
    if not fields.has("layer_types"):
        first = fields.count("max_window_layers", _FIRST_LAYER)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.choices("layer_types", (_FULL, _SLIDING), num_layers)
    if window is None and _SLIDING in kinds:
        fields.refuse("layer_types", f"all {_FULL} where sliding_window is null or not used")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
