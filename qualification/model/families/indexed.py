"""Fields of config.json of families whose latents are read where an indexer chooses: DeepSeek V3.2 and GLM 5."""

from collections.abc import Callable
from dataclasses import replace

from qualification.model.config import FeedForward, LayerConfig, ModelConfig
from qualification.model.families.deepseek_v3 import MIXTURE, read_sigmoid_experts
from qualification.model.families.latent import READ, read_latent
from qualification.model.fields import Fields
from qualification.model.latent import IndexerConfig, LatentAttentionConfig, LatentSizes
from qualification.model.mixtures import KINDS, read_mixtures_by_kind

_MOST_KEYS = 2048  # of a query, where config.json does not say
_DIM = 128  # of an indexer's key, likewise
_LAYERS, _INDEXED = "layer_types", "indexed_attention"  # as transformers writes of every layer


def read_indexed(
    fields: Fields,
    family: str,
    *,
    sizes: LatentSizes,
    norm_eps: float,
    num_index_heads: int,
    neighbours: bool,
    is_own: Callable[[Fields, int], tuple[bool, ...]],
) -> ModelConfig:
    """Read a model whose layers attend to chosen keys. Raises ModelConfigError.

    num_index_heads  of the indexer, where config.json does not say
    neighbours       whether the pairs that an indexer rotates are neighbours
    is_own           whether each of so many layers has an indexer
    """
    model = read_latent(fields, family, sizes=sizes, norm_eps=norm_eps, feed_forwards=_read_feed_forwards)
    if fields.has(_LAYERS):
        fields.choices(_LAYERS, (_INDEXED,), len(model.layers))
    indexer = IndexerConfig(
        count=fields.integer("index_topk", _MOST_KEYS),
        num_heads=fields.integer("index_n_heads", num_index_heads),
        dim=fields.integer("index_head_dim", _DIM),
        neighbours=neighbours,
    )
    found = model.layers[0].mixer
    assert isinstance(found, LatentAttentionConfig), "read_latent gives layers with latents"
    if found.sizes.query_latent is None:
        fields.refuse("q_lora_rank", "a positive integer: an indexer's queries are made of the query latent")
    if indexer.dim < found.sizes.rotated:
        fields.refuse("index_head_dim", f"at least qk_rope_head_dim ({found.sizes.rotated})")

    def changed(layer: LayerConfig, own: bool) -> LayerConfig:
        assert isinstance(layer.mixer, LatentAttentionConfig), "read_latent gives layers with latents"
        return replace(layer, mixer=replace(layer.mixer, indexer=replace(indexer, is_own=own)))

    return replace(model, layers=tuple(map(changed, model.layers, is_own(fields, len(model.layers)))))


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_dense = fields.count("first_k_dense_replace", 3)
    return read_mixtures_by_kind(fields, read_sigmoid_experts, num_dense_missing=num_dense)


INDEXED_READ = f"{READ} {MIXTURE} {KINDS} {_LAYERS} index_topk index_n_heads index_head_dim"
