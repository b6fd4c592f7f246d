"""The attention shape and the IO model."""

import random
from dataclasses import replace

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import (
    AttentionShape,
    Dtype,
    Mask,
    Phase,
    flops,
    hbm_bytes_standard,
    hbm_bytes_tiled,
    num_visible_pairs,
)

SHAPE = AttentionShape(
    Phase.PREFILL, Dtype.BF16, Dtype.BF16, 32, 8, 128, Bucket.LE_2K, Bucket.LE_2K
)  # fmt: skip


def test_visible_pairs_are_those_that_counting_finds() -> None:
    random.seed(0)
    for _ in range(300):
        num_keys = random.randint(1, 40)
        num_queries = random.randint(1, num_keys)
        window = random.choice([None, *range(1, 45)])
        counted = sum(
            1
            for query in range(num_keys - num_queries, num_keys)
            for key in range(num_keys)
            if key <= query and (window is None or query - key < window)
        )
        assert num_visible_pairs(num_queries, num_keys, window) == counted, (num_queries, num_keys, window)


def test_causal_attention_costs_half_the_square() -> None:
    assert flops(SHAPE, 2048, 2048) == 4 * (2048 * 2049 // 2) * 128 * 32


def test_full_attention_costs_the_square() -> None:
    assert flops(replace(SHAPE, mask=Mask.FULL), 100, 300) == 4 * 100 * 300 * 128 * 32


def test_tiled_attention_moves_each_tensor_once() -> None:
    queries, keys = 2 * 10 * 32 * 128 * 2, 2 * 50 * 8 * 128 * 2
    assert hbm_bytes_tiled(SHAPE, 10, 50) == queries + keys


def test_a_window_spares_the_keys_before_it() -> None:
    queries, keys = 2 * 10 * 32 * 128 * 2, 2 * (5 + 9) * 8 * 128 * 2
    assert hbm_bytes_tiled(replace(SHAPE, window=5), 10, 50) == queries + keys


def test_keys_of_another_dtype_have_its_size() -> None:
    difference = hbm_bytes_tiled(replace(SHAPE, kv_dtype=Dtype.FP32), 10, 50) - hbm_bytes_tiled(SHAPE, 10, 50)
    assert difference == 2 * 50 * 8 * 128 * 2


def test_standard_attention_moves_scores_and_weights_twice() -> None:
    assert hbm_bytes_standard(SHAPE, 10, 50) - hbm_bytes_tiled(SHAPE, 10, 50) == 4 * 10 * 50 * 32 * 2
