"""The least time of a whole step, by the FLOPs and bytes of a model."""

from kernels.shape import Dtype, num_visible_pairs
from qualification.measure.ceilings import Ceilings
from qualification.model.config import ModelConfig, num_parameters


def step_floor_ms(
    config: ModelConfig, dtype: Dtype, kv_dtype: Dtype, ceilings: Ceilings, rows: list[tuple[int, int]]
) -> float:
    """Return the floor of a step with these rows: (new tokens, context with them), each row's last token sampled."""
    num_tokens = sum(num_queries for num_queries, _ in rows)
    embedding = config.embedding_size
    layers = num_parameters(config) - embedding * (1 if config.tie_embeddings else 2)
    flops = 2 * (layers * num_tokens + embedding * len(rows))
    num_bytes = (layers + embedding) * dtype.num_bytes  # the head; looked-up rows of the embedding are few
    for attention in (layer.attention for layer in config.layers):
        window, kv_bytes = attention.window, 2 * attention.kv_size * kv_dtype.num_bytes  # of a token in a layer
        for num_queries, context in rows:
            flops += 4 * num_visible_pairs(num_queries, context, window) * attention.query_size
            num_read = context if window is None else min(context, window + num_queries - 1)
            num_bytes += kv_bytes * num_read  # those that this step writes too, once
    return ceilings.floor_us(flops, num_bytes) / 1e3
