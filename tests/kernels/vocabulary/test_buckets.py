"""Length buckets."""

import pytest

from kernels.vocabulary.buckets import Bucket, bucket_of, buckets_up_to


@pytest.mark.parametrize("bucket", Bucket)
def test_a_length_belongs_to_the_bucket_that_holds_it(bucket: Bucket) -> None:
    assert bucket_of(bucket.lo + 1) is bucket_of(bucket.hi or 10**9) is bucket


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_there_is_no_bucket_below_one_token(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 token, got {num_tokens}"):
        bucket_of(num_tokens)


def test_buckets_meet_without_gap_or_overlap() -> None:
    buckets = list(Bucket)
    assert buckets[0].lo == 0
    assert [bucket.hi for bucket in buckets[:-1]] == [bucket.lo for bucket in buckets[1:]]
    assert buckets[-1].hi is None


@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (128, 1), (129, 2), (4096, 4), (131073, 7)])
def test_the_buckets_up_to_a_length_hold_every_shorter_one(num_tokens: int, count: int) -> None:
    buckets = buckets_up_to(num_tokens)
    assert buckets == tuple(Bucket)[:count]
    assert buckets[-1] is bucket_of(num_tokens)
