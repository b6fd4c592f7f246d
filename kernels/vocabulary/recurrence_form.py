"""The rules by which a recurrence changes its state."""

from enum import Enum


class RecurrenceForm(Enum):
    """Change of a head's state S [key_dim, value_dim] by a token; the value is the name in a shape's line."""

    GATED_DELTA = "gated-delta"  # S = decay * S + k (beta * (v - k S)), with normed keys and queries
    STATE_SPACE = "state-space"  # Mamba2: S = decay * S + B (step * x), read by C; queries, keys, values are C, B, x
    FIXED_DECAY = "fixed-decay"  # lightning attention: S = decay * S + k v, of decays that no token changes
    CHANNEL_DELTA = "channel-delta"  # Kimi Delta Attention: as the gated delta rule, with a decay for each of key_dim
