"""The least time of a whole step, by the FLOPs and bytes of a model."""

from kernels.vocabulary.shape import Dtype, num_visible_pairs
from qualification.measure.costs.ceilings import Ceilings
from qualification.model.config import ModelConfig, cached_bytes_of, num_parameters, weight_bytes


def step_floor_ms(
    config: ModelConfig, dtype: Dtype, kv_dtype: Dtype, ceilings: Ceilings, rows: list[tuple[int, int]]
) -> float:
    """Return the floor of a step with these rows: (new tokens, context with them), each row's last token sampled."""
    num_tokens = sum(num_queries for num_queries, _ in rows)
    embedding = config.embedding_size
    num_looked_up = embedding * (0 if config.tie_embeddings else 1)  # rows of it, which are few
    layers = num_parameters(config, num_tokens=1) - num_looked_up - embedding
    flops = 2 * (layers * num_tokens + embedding * len(rows))
    num_bytes = weight_bytes(config, dtype, num_tokens) - num_looked_up * dtype.num_bytes
    for attention in config.attentions:
        window, kv_bytes = attention.window, cached_bytes_of(attention, kv_dtype)
        dims = attention.head_dim + (attention.head_dim if attention.values is None else attention.values.dim)
        for num_queries, context in rows:
            flops += 2 * num_visible_pairs(num_queries, context, window) * attention.num_heads * dims
            num_read = context if window is None else min(context, window + num_queries - 1)
            num_bytes += kv_bytes * num_read  # those that this step writes too, once
    return ceilings.floor_us(flops, num_bytes) / 1e3
