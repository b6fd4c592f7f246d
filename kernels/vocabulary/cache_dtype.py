"""The dtype of keys and values that are stored with scales beside them. Imports no torch."""

from enum import Enum
from typing import Final, cast

from kernels.vocabulary.shape import Dtype


class _CacheDtype(Enum):
    """A dtype that only a cache's pages have: of no query, no weight and no output."""

    FP8 = "fp8"  # e4m3, an fp32 scale for each token and KV head: `kernels/fp8_cache/pages.py`

    @property
    def num_bytes(self) -> int:
        """Return the size of one element, its share of a scale left out."""
        return 1


# For the type checker one of `Dtype`, which it is no member of: the digest of every path that imports `Dtype`, products
# that know no cache among them, would change. To become a member when those paths are next proven again.
FP8: Final = cast("Dtype", _CacheDtype.FP8)


def cache_dtype_of(value: str) -> Dtype:
    """Return the dtype of keys and values of this name. Raises ValueError for a name of none."""
    return FP8 if value == FP8.value else Dtype(value)


def cached_bytes(kv_dtype: Dtype, head_dim: int) -> int:
    """Return the bytes that a cache holds of one token's keys, or values, of one head; its scale included."""
    return head_dim * kv_dtype.num_bytes + (4 if kv_dtype is FP8 else 0)
