"""Multi-head latent attention: keys and values of all heads are products of one short vector a token, its latent.

A page keeps the latent behind its norm, and one rotated vector for all heads. Products with the latent are absorbed
into queries and results: queries have as many numbers as a page's key, and attention's results are sums of latents.
Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

from dataclasses import dataclass, field

from kernels.vocabulary.value_shape import Indexer, Values
from qualification.model.config import AttentionConfig, RopeConfig

NORM_EPS = 1e-6  # of both inner norms in every published class, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """latent       numbers of a latent
    rotated      numbers that are rotated, of a query and of the one key vector that all heads share
    plain        numbers of a query, and of a head's key, that are not rotated
    value        numbers of a head's value
    query_latent numbers that queries are made of; None: they are a product of what attention reads
    """

    latent: int
    rotated: int
    plain: int
    value: int
    query_latent: int | None

    @property
    def query(self) -> int:
        """Return the numbers of a head's query before a product is absorbed into it."""
        return self.plain + self.rotated

    @property
    def key(self) -> int:
        """Return the numbers of a token that a page keeps."""
        return self.latent + self.rotated


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """The choice of the keys that a query attends to: DeepSeek sparse attention's lightning indexer.

    Its queries are a product of the query latent; its one key a token is a LayerNorm of a product of what attention
    reads, and lies behind the latent's in the pages; a third product makes a weight of each of its heads. The first
    numbers of queries and keys are rotated, as many as of attention's.

    count       the most keys of a query
    num_heads   of its queries
    dim         numbers of a query and of a key
    neighbours  whether the pairs that are rotated are neighbours
    is_own      whether the layer has such products; else the choice of the layer before it that has them is read
    Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp".
    """

    count: int
    num_heads: int
    dim: int
    neighbours: bool
    is_own: bool = True


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig(AttentionConfig):
    """Attention of absorbed queries: one KV head, whose keys are latent and rotated numbers, and its values the latent.

    Projected are the query latent, or without one the queries, then latent and rotated numbers.
    indexer  what chooses the keys that a query attends to; None: it attends to all before it
    """

    sizes: LatentSizes = field(kw_only=True)
    indexer: IndexerConfig | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, sizes: LatentSizes, num_heads: int, scale: float, rope: RopeConfig) -> "LatentAttentionConfig":
        """Return the attention of so many query heads; `rope` is of `sizes.rotated` numbers."""
        return cls(num_heads, 1, sizes.key, scale, rope, sizes=sizes)

    @property
    def values(self) -> Values | None:
        indexer = None
        if self.indexer is not None:
            sizes = (self.indexer.num_heads, self.indexer.dim) if self.indexer.is_own else ()
            indexer = Indexer(self.indexer.count, *sizes)
        return Values(self.sizes.latent, True, indexer)

    @property
    def own_indexer(self) -> IndexerConfig | None:
        """Return the indexer of a layer that has one of its own."""
        return self.indexer if self.indexer is not None and self.indexer.is_own else None

    @property
    def cached_dim(self) -> int:
        return self.head_dim + (0 if self.own_indexer is None else self.own_indexer.dim)

    @property
    def rotary_dim(self) -> int:
        return self.sizes.rotated

    @property
    def output_dim(self) -> int:
        return self.sizes.value

    @property
    def num_projected_queries(self) -> int:
        """Return the rows of the first product before those of latent and rotated numbers."""
        return self.sizes.query_latent or self.num_heads * self.sizes.query

    @property
    def projected_size(self) -> int:
        return self.num_projected_queries + self.sizes.key

    @property
    def query_up_numbers(self) -> int:
        return (self.sizes.query_latent or 0) * self.num_heads * self.sizes.query

    @property
    def kv_up_numbers(self) -> int:
        return self.sizes.latent * self.num_heads * (self.sizes.plain + self.sizes.value)

    def num_parameters(self, hidden: int) -> int:
        norms = self.sizes.latent + (self.sizes.query_latent or 0)
        products = hidden * (self.projected_size + self.output_size)
        found = products + self.query_up_numbers + self.kv_up_numbers + norms
        if (own := self.own_indexer) is None:
            return found
        return found + sum(self.indexer_numbers(hidden)) + hidden * own.num_heads + 2 * own.dim

    def indexer_numbers(self, hidden: int) -> tuple[int, int]:
        if (own := self.own_indexer) is None:
            return 0, 0
        return (self.sizes.query_latent or 0) * own.num_heads * own.dim, hidden * own.dim
