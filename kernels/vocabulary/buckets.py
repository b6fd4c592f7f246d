"""Length buckets: the half-open intervals of tokens that kernels are proven for and requests are measured under."""

from enum import Enum


class Bucket(Enum):
    """`(lo, hi]` tokens; the value is the label used in metrics, the matrix and the plan."""

    LE_128 = "le_128"
    LE_512 = "le_512"
    LE_2K = "le_2k"
    LE_8K = "le_8k"
    LE_32K = "le_32k"
    LE_128K = "le_128k"
    GT_128K = "gt_128k"

    @property
    def label(self) -> str:
        return self.value

    @property
    def lo(self) -> int:
        """The largest number of tokens that is still below this bucket."""
        return _EDGES[self][0]

    @property
    def hi(self) -> int | None:
        """The largest number of tokens in this bucket; None for the last one, which has no end."""
        return _EDGES[self][1]


_EDGES: dict[Bucket, tuple[int, int | None]] = {
    Bucket.LE_128: (0, 128),
    Bucket.LE_512: (128, 512),
    Bucket.LE_2K: (512, 2048),
    Bucket.LE_8K: (2048, 8192),
    Bucket.LE_32K: (8192, 32768),
    Bucket.LE_128K: (32768, 131072),
    Bucket.GT_128K: (131072, None),
}


def bucket_of(num_tokens: int) -> Bucket:
    """The bucket of a positive number of tokens. Raises ValueError below 1."""
    if num_tokens < 1:
        raise ValueError(f"a length must be at least 1 token, got {num_tokens}")
    for bucket, (_, hi) in _EDGES.items():
        if hi is None or num_tokens <= hi:
            return bucket
    raise AssertionError("the last bucket has no end")


def buckets_up_to(num_tokens: int) -> tuple[Bucket, ...]:
    """Every bucket that lengths 1..num_tokens fall into, shortest first."""
    return tuple(bucket for bucket in Bucket if bucket.lo < num_tokens)
