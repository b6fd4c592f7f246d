"""Attention whose values are the first numbers of its keys, as a shape, and what any shape costs.

It is a class of its own: digests of committed evidence cover `shape.py` and `operators.py`, as they are written.
TODO: make it a field of `AttentionShape` when `cublaslt.linear.ordered` is next proven on the GPUs of the matrix.
"""

from dataclasses import dataclass, field, fields

from kernels.vocabulary.operators import AnyShape, flops_of, hbm_bytes_of
from kernels.vocabulary.shape import AttentionShape, Mask, num_visible_pairs


@dataclass(frozen=True, slots=True)
class LatentShape(AttentionShape):
    """latent_dim  how many of a key's first numbers are its value, and how many a head's result has"""

    latent_dim: int = field(kw_only=True)

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        dim = f" d{self.head_dim} "
        return AttentionShape.__str__(self).replace(dim, f" d{self.head_dim}/latent-{self.latent_dim} ", 1)


def latent_shape(shape: AttentionShape, latent_dim: int) -> LatentShape:
    """Return the same shape of values that are the first numbers of the keys."""
    given = {each.name: getattr(shape, each.name) for each in fields(AttentionShape)}
    return LatentShape(**given, latent_dim=latent_dim)


def latent_dim_of(shape: AttentionShape) -> int | None:
    """Return how many of a key's first numbers are its value; None where values are other numbers."""
    return shape.latent_dim if isinstance(shape, LatentShape) else None


def any_flops(shape: AnyShape, num_queries: int, num_keys: int) -> int:
    """Floating-point operations of one sequence of attention, or of a call on `num_queries` rows."""
    if not isinstance(shape, LatentShape):
        return flops_of(shape, num_queries, num_keys)
    visible = num_visible_pairs(num_queries, num_keys, shape.window)
    pairs = num_queries * num_keys if shape.mask is Mask.FULL else visible
    return 2 * pairs * (shape.head_dim + shape.latent_dim) * shape.num_heads


def any_hbm_bytes(shape: AnyShape, num_queries: int, num_keys: int) -> tuple[int, int]:
    """HBM bytes by the IO model, of tiled and of standard attention, or of another operator: keys are read once."""
    tiled, standard = hbm_bytes_of(shape, num_queries, num_keys)
    if not isinstance(shape, LatentShape):
        return tiled, standard
    visible = num_keys if shape.window is None else min(num_keys, shape.window + num_queries - 1)
    results = num_queries * shape.num_heads * (shape.head_dim + shape.latent_dim) * shape.dtype.num_bytes
    own = results + visible * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.num_bytes
    return own, standard - tiled + own
