"""The sizes of a recurrent layer, and the tensors that it keeps of a sequence.

A sequence is computed in chunks of 64 tokens, at absolute multiples of 64 from its first token on. What a layer keeps
is the state at such a border, and of each token behind it the numbers that add it to the state. So a token is the same
sum in the same order whether it is computed in a prompt, in a part of one, or alone; a token alone reads the state, and
only the last one of a chunk writes it.
"""

from dataclasses import dataclass

from kernels.vocabulary.shape import Dtype

CHUNK = 64  # tokens
BLOCK = 16  # tokens of a chunk that are summed together


@dataclass(frozen=True, slots=True)
class RecurrenceSizes:
    """num_value_heads  a multiple of the key heads; value head h reads key head h // (value heads / key heads)
    key_dim, value_dim  numbers of a head
    width               tokens that the convolution reads, the newest included
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer has."""
        if min(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.width) < 1:
            raise ValueError(f"sizes of a recurrence must be at least 1, found {self}")
        if self.num_value_heads % self.num_key_heads:
            heads = f"{self.num_value_heads} value heads and {self.num_key_heads} key heads"
            raise ValueError(f"each key head needs as many value heads, found {heads}")

    @property
    def group(self) -> int:
        """Value heads that read one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values, in that order."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_tensors(
        self, dtype: Dtype, state_dtype: Dtype, num_drafted: int = 0
    ) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
        """Return shape and dtype of each tensor of `RecurrenceState`, of one sequence.

        num_drafted  tokens that a step may compute and take back
        """
        # Behind a step of `VERIFY` the state is up to a chunk and 1 + num_drafted tokens behind, whose numbers the next
        # one reads while it writes as many new ones.
        ring = CHUNK + (2 * num_drafted + 1 if num_drafted else 0)
        return (
            ((self.num_value_heads, self.key_dim, self.value_dim), state_dtype),
            ((self.width + num_drafted, self.conv_dim), dtype),
            ((ring, self.num_key_heads, self.key_dim), dtype),
            ((ring, self.num_value_heads, self.value_dim), dtype),
            ((ring, self.num_value_heads), Dtype.FP32),
            ((ring, self.num_value_heads), Dtype.FP32),
            ((BLOCK + num_drafted, self.num_value_heads, self.value_dim), Dtype.FP32),
        )
