"""Attention whose values have another size than its keys, as a shape, and what any shape costs.

It is a class of its own: digests of committed evidence cover `shape.py` and `operators.py`, as they are written.
TODO: make it a field of `AttentionShape` when `cublaslt.linear.ordered` is next proven on the GPUs of the matrix.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from kernels.vocabulary.operators import AnyShape, flops_of, hbm_bytes_of
from kernels.vocabulary.shape import AttentionShape, Mask, num_visible_pairs


class Indexer(NamedTuple):
    """The choice of the keys that a query attends to. A tuple, hashed for each decision.

    num_keys  the most that a query attends to
    heads     of what chooses them; 0 where the choice of an earlier layer is read
    dim       numbers of such a head, and of the one key a token that all of them share
    """

    num_keys: int
    heads: int = 0
    dim: int = 0

    def __str__(self) -> str:
        return f"top{self.num_keys}" + (f"-index{self.heads}x{self.dim}" if self.heads else "")


class Values(NamedTuple):
    """Values of another size than keys. A tuple, hashed for each decision.

    dim        numbers of a head's value, and of its result
    is_latent  whether they are the first numbers of the key, and not numbers of their own
    indexer    what chooses the keys that they belong to; None: a query attends to all that it sees
    """

    dim: int
    is_latent: bool = False
    indexer: Indexer | None = None

    def __str__(self) -> str:
        kind = f"{'latent' if self.is_latent else 'value'}-{self.dim}"
        return kind if self.indexer is None else f"{kind}/{self.indexer}"


@dataclass(frozen=True, slots=True)
class ValueShape(AttentionShape):
    """Attention whose values have another size than its keys."""

    values: Values = field(kw_only=True)

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        dim = f" d{self.head_dim} "
        return AttentionShape.__str__(self).replace(dim, f" d{self.head_dim}/{self.values} ", 1)


def with_values(shape: AttentionShape, values: Values | None) -> AttentionShape:
    """Return the same shape of other values; itself where they are as the keys."""
    if values is None:
        return shape
    given = {each.name: getattr(shape, each.name) for each in fields(AttentionShape)}
    return ValueShape(**given, values=values)


def values_of(shape: AttentionShape) -> Values | None:
    """Return the values where they have another size than the keys; else None."""
    return shape.values if isinstance(shape, ValueShape) else None


def value_dim_of(shape: AttentionShape) -> int:
    """Return the numbers of a head's value, and of its result."""
    return shape.values.dim if isinstance(shape, ValueShape) else shape.head_dim


def indexer_of(shape: AnyShape) -> Indexer | None:
    """Return what chooses the keys that a query attends to; None where it attends to all that it sees."""
    return shape.values.indexer if isinstance(shape, ValueShape) else None


def any_flops(shape: AnyShape, num_queries: int, num_keys: int) -> int:
    """Floating-point operations of one sequence of attention, or of a call on `num_queries` rows."""
    if not isinstance(shape, ValueShape):
        return flops_of(shape, num_queries, num_keys)
    visible = num_visible_pairs(num_queries, num_keys, shape.window)
    pairs, of_indexer = num_queries * num_keys if shape.mask is Mask.FULL else visible, 0
    if (indexer := shape.values.indexer) is not None:
        pairs = num_visible_pairs(num_queries, num_keys, indexer.num_keys)  # of each query as many keys as of a window
        of_indexer = 2 * visible * indexer.heads * indexer.dim
    return of_indexer + 2 * pairs * (shape.head_dim + shape.values.dim) * shape.num_heads


def any_hbm_bytes(shape: AnyShape, num_queries: int, num_keys: int) -> tuple[int, int]:
    """HBM bytes by the IO model, of tiled and of standard attention, or of another operator: keys are read once."""
    tiled, standard = hbm_bytes_of(shape, num_queries, num_keys)
    if not isinstance(shape, ValueShape):
        return tiled, standard
    visible = num_keys if shape.window is None else min(num_keys, shape.window + num_queries - 1)
    of_indexer = 0
    if (indexer := shape.values.indexer) is not None:
        of_indexer = visible * indexer.dim * shape.kv_dtype.num_bytes
        visible = min(num_keys, indexer.num_keys * num_queries)
    results = num_queries * shape.num_heads * (shape.head_dim + shape.values.dim) * shape.dtype.num_bytes
    read = shape.head_dim + (0 if shape.values.is_latent else shape.values.dim)
    own = of_indexer + results + visible * shape.num_kv_heads * read * shape.kv_dtype.num_bytes
    return own, standard - tiled + own
