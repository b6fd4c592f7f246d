"""EXAONE 4: norms after attention and feed-forward only, and of each head of queries and keys.

The 32B has a window in three layers of four, and its other layers rotate nothing; the 1.2B has no windows.
"""

from qualification.model.config import ModelConfig, NormsConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama, without_rotation
from qualification.model.windows import WINDOW, Windows, no_windows, read_periodic_windows

PATTERN = "sliding_window_pattern"


def read_config(fields: Fields) -> ModelConfig:
    model = read_like_llama(
        fields,
        "exaone4",
        norm_eps=1e-5,
        norms=NormsConfig(before=False, after=True),
        qk_norm=QKNorm.EACH_HEAD,
        windows=read_exaone_windows,
    )
    return with_windows_rotated(fields, model)


def with_windows_rotated(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Return the model with rotations in layers with a window alone; all rotate where the model has no window."""
    if fields.integer_or_none("sliding_window", WINDOW) is None:
        return model
    full = frozenset(layer for layer, window in enumerate(read_exaone_windows(fields)) if window is None)
    return without_rotation(model, full)


def read_exaone_windows(fields: Fields) -> Windows:
    """Read layer_types, else one layer without a window after each sliding_window_pattern - 1 with one."""
    has_types, has_window = fields.has("layer_types"), fields.integer_or_none("sliding_window", WINDOW) is not None
    if not has_types and not has_window:
        return no_windows(fields)
    # Published files write it as letters, "LLLG", beside layer_types, which say the same and win.
    period = 1 if has_types else fields.integer(PATTERN, 4)
    return read_periodic_windows(fields, missing=WINDOW, period=period)


KEYS = family_keys(f"sliding_window {PATTERN} layer_types")
EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM",), read_config, KEYS)
