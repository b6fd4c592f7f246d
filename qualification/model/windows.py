"""The sliding windows of a config.json's layers, by the rules and defaults of transformers' classes.

A window of w is the w latest positions, the token's own included: transformers' mask and our attention agree on this.
"""

from collections.abc import Callable

from qualification.model.fields import Fields

WINDOW = 4096  # where sliding_window is missing (null means none): Qwen2Config, Qwen3Config, MistralConfig, both Gemmas
_FIRST_LAYER = 28  # where max_window_layers is missing: Qwen2Config, Qwen3Config
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MAX_LAYERS = 10_000

Windows = tuple[int | None, ...]  # one a layer; None: no window


def read_num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=_MAX_LAYERS)


def no_windows(fields: Fields) -> Windows:
    """No layer has one."""
    return (None,) * read_num_layers(fields)


def read_uniform_windows(fields: Fields, *, missing: int | None) -> Windows:
    """The same window, or none, in every layer; `missing` where the field is. Raises ModelConfigError."""
    fields.absent("layer_types", "this family has one kind of layer")
    return (fields.integer_or_none("sliding_window", missing),) * read_num_layers(fields)


def read_switched_windows(fields: Fields) -> Windows:
    """Qwen's: none unless use_sliding_window; then by layer_types, or from layer max_window_layers on.

    Raises ModelConfigError.
    """
    window = fields.integer_or_none("sliding_window", WINDOW) if fields.flag("use_sliding_window", False) else None
    first = fields.count("max_window_layers", _FIRST_LAYER)
    return read_windows_of(fields, window, lambda layer: layer >= first)


def read_switched_alternating_windows(fields: Fields) -> Windows:
    """Qwen 2's with experts: none unless use_sliding_window; then in every other layer before max_window_layers.

    Raises ModelConfigError.
    """
    window = fields.integer_or_none("sliding_window", WINDOW) if fields.flag("use_sliding_window", False) else None
    end = fields.count("max_window_layers", _FIRST_LAYER)
    return read_windows_of(fields, window, lambda layer: layer % 2 == 0 and layer < end)


def read_alternating_windows(fields: Fields, *, missing: int | None) -> Windows:
    """Read layer_types, else every other layer from the first on: Gemma 2, gpt-oss. Raises ModelConfigError."""
    return read_windows_of(fields, fields.integer_or_none("sliding_window", missing), lambda layer: layer % 2 == 0)


def read_patterned_windows(fields: Fields, *, missing: int | None, pattern: int) -> Windows:
    """Read layer_types, else all layers but each sliding_window_pattern-th: Gemma 3. Raises ModelConfigError."""
    return read_periodic_windows(fields, missing=missing, period=fields.integer("sliding_window_pattern", pattern))


def read_periodic_windows(fields: Fields, *, missing: int | None, period: int) -> Windows:
    """Read layer_types, else all layers but each `period`-th: OLMo 3, EXAONE 4. Raises ModelConfigError."""
    window = fields.integer_or_none("sliding_window", missing)
    return read_windows_of(fields, window, lambda layer: (layer + 1) % period != 0)


def read_windows_of(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> Windows:
    """`has_window`: for a config.json written before layer_types existed."""
    num_layers = read_num_layers(fields)
    if not fields.has("layer_types"):
        return tuple(window if has_window(layer) else None for layer in range(num_layers))
    kinds = fields.choices("layer_types", (_FULL, _SLIDING), num_layers)
    if window is None and _SLIDING in kinds:
        fields.refuse("layer_types", f"all {_FULL} where sliding_window is null or not used")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
