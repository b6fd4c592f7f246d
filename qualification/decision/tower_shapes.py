"""Every shape that a tower needs to compute the images that a server takes."""

from collections.abc import Iterator

from kernels.linear.shape import LinearShape
from kernels.vocabulary.buckets import bucket_of, buckets_up_to
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from qualification.model.tower import TowerConfig


def tower_shapes_needed(tower: TowerConfig, dtype: Dtype, max_image_tokens: int) -> tuple[AnyShape, ...]:
    """Return the shapes of attention over patches, then those of the products with each weight.

    max_image_tokens  of the images that are computed together, and so of one image
    """
    if not max_image_tokens:
        return ()
    return tuple(
        dict.fromkeys((*tower_attention(tower, dtype, max_image_tokens), *_products(tower, dtype, max_image_tokens)))
    )


def tower_attention(tower: TowerConfig, dtype: Dtype, max_image_tokens: int) -> tuple[AttentionShape, ...]:
    """Return the shapes of a tower's attention: of whole images, and of windows, which are short images to a kernel."""
    if not tower.num_layers:
        return ()
    buckets = [] if tower.is_tiled else list(buckets_up_to(tower.most_patches(max_image_tokens)))
    if tower.window_rows is not None:
        of_window = bucket_of(tower.window_rows)
        buckets += [] if of_window in buckets else [of_window]
    heads, dim = tower.num_heads, tower.head_dim
    return tuple(
        AttentionShape(Phase.PREFILL, dtype, dtype, heads, heads, dim, bucket, bucket, mask=Mask.FULL)
        for bucket in buckets
    )


def _products(tower: TowerConfig, dtype: Dtype, max_image_tokens: int) -> Iterator[LinearShape]:
    hidden, has_biases = tower.hidden_size, tower.has_biases
    most_rows = max_image_tokens * tower.merge**2
    most_rows += tower.num_windows(most_rows) if tower.has_class_token else 0
    of_patches = (
        (tower.patch_numbers, hidden, tower.has_patch_bias),
        (hidden, 3 * hidden, has_biases if tower.has_qkv_bias is None else tower.has_qkv_bias),
        (hidden, hidden, has_biases),
        (hidden, tower.padded_width * (2 if tower.is_gated else 1), has_biases),
        (tower.padded_width, hidden, has_biases),
    )
    for size_in, size_out, with_bias in of_patches if tower.num_layers else of_patches[:1]:
        for rows in LinearRows.up_to(most_rows):
            if rows.hi is None or rows.hi >= tower.merge**2:  # the fewest patches are those of one token
                yield LinearShape(dtype, size_in, size_out, rows, with_bias)
    for size_in, size_out, with_bias in tower.merger_products:
        for rows in LinearRows.up_to(max_image_tokens):
            yield LinearShape(dtype, size_in, size_out, rows, with_bias)
