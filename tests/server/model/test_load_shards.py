"""Parts of a checkpoint that ranks read: together they are the whole, and no rank reads another's."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qualification.model.config import ModelConfig
from qualification.model.families.family import TensorNames
from qualification.model.families.registry import family_named
from qualification.model.shard import Shard, shard_of
from server.model.empty_weights import empty_weights
from server.model.layers import LayerWeights, Weights
from server.model.linear import Linear, WeightName
from server.model.load.checkpoint import copy_pieces, read_entries
from server.model.load.load import load_config, load_decoder, load_shard
from server.model.load.shards import empty_shard, pieces_of
from server.model.tensor_views import checkpoint_views
from server.settings import LoadFormat

CPU = torch.device("cpu")
LLAMA: dict[str, object] = {
    "model_type": "llama", "vocab_size": 13, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "merged": {**LLAMA, "model_type": "phi3"},
    "head norms": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
}


def names_of(config: ModelConfig) -> TensorNames:
    names = family_named(config.family, "test").tensors
    assert names is not None
    return names


def write(folder: Path, values: dict[str, object]) -> ModelConfig:
    """Save a model of random weights."""
    (folder / "config.json").write_text(json.dumps(values))
    config = load_config(folder)
    generator = torch.Generator().manual_seed(0)
    views = checkpoint_views(empty_weights(config, torch.float32, CPU), config, names_of(config))
    tensors = {name: torch.randn(view.values.shape, generator=generator) for name, view in views.items()}
    save_file(tensors, folder / "model.safetensors")
    return config


def whole(folder: Path, config: ModelConfig) -> Weights:
    return load_decoder(folder, config, dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO).weights


def split_rows(linear: Linear, sizes: list[int]) -> list[tuple[Tensor, Tensor | None]]:
    return [(part.weight.dequantized(), part.bias) for part in linear.split(*sizes)]


def joined(parts: list[Tensor | None], dim: int = 0) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found, dim) if found else None


def same(found: Tensor | None, due: Tensor | None) -> bool:
    return found is None is due if found is None or due is None else torch.equal(found, due)


def check_layer(shards: list[Shard], parts: list[LayerWeights], due: LayerWeights, head_dim: int) -> None:
    heads = [shard.layers[0].heads for shard in shards]
    whole_heads = shards[0].layers[0].whole.attention
    whole_sizes = [whole_heads.query_size, whole_heads.kv_size, whole_heads.kv_size]
    qkv = [
        split_rows(part.qkv, [len(own.query) * head_dim, *[len(own.kv) * head_dim] * 2])
        for part, own in zip(parts, heads, strict=True)
    ]
    for kind, (weight, bias) in enumerate(split_rows(due.qkv, whole_sizes)):
        if kind == 0:
            assert same(joined([own[0][0] for own in qkv]), weight)
            assert same(joined([own[0][1] for own in qkv]), bias)
            continue
        for own, head in zip(qkv, heads, strict=True):  # several ranks may hold the same KV head
            rows = slice(head.kv.start * head_dim, head.kv.stop * head_dim)
            assert same(own[kind][0], weight[rows])
            assert same(own[kind][1], None if bias is None else bias[rows])
    width = shards[0].layers[0].width.stop
    gate_up = [split_rows(part.linears[WeightName.GATE_UP], [width, width]) for part in parts]
    for kind, (weight, bias) in enumerate(split_rows(due.linears[WeightName.GATE_UP], [width * len(parts)] * 2)):
        assert same(joined([own[kind][0] for own in gate_up]), weight)
        assert same(joined([own[kind][1] for own in gate_up]), bias)
    for name in (WeightName.OUTPUT, WeightName.DOWN):
        linears = [part.linears[name] for part in parts]
        assert same(joined([it.weight.dequantized() for it in linears], 1), due.linears[name].weight.dequantized())
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = due.linears[name].bias
        assert same(sum(biases[1:], biases[0]) if biases else None, bias)  # what the sum over the ranks adds
    for part in parts:
        assert same(part.attention_norm, due.attention_norm)
        assert same(part.q_norm, due.q_norm)
        assert same(part.k_norm, due.k_norm)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_shards_put_together_are_the_whole(tmp_path: Path, model: str, world: int) -> None:
    config = write(tmp_path, MODELS[model])
    due = whole(tmp_path, config)
    shards = [shard_of(config, rank, world) for rank in range(world)]
    parts = [load_shard(tmp_path, config, shard, dtype=torch.float32, device=CPU) for shard in shards]
    for layer, layer_due in enumerate(due.layers):
        own = [part.layers[layer] for part in parts]
        check_layer(shards, own, layer_due, config.layers[0].attention.head_dim)
    assert same(joined([part.head.weight.dequantized() for part in parts]), due.head.weight.dequantized())
    for part in parts:
        assert same(part.embedding, due.embedding)
        assert same(part.final_norm, due.final_norm)
        assert (
            part.head.weight.dequantized().untyped_storage().data_ptr() == part.embedding.untyped_storage().data_ptr()
        ) == (config.tie_embeddings)


@pytest.mark.parametrize("part_bytes", [1, 100, 2**23])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, model: str, part_bytes: int) -> None:
    config = write(tmp_path, MODELS[model])
    shard = shard_of(config, 1, 2)
    weights = empty_shard(shard, torch.float32, CPU)
    pieces = pieces_of(weights, shard, names_of(config))
    entries = read_entries(tmp_path)
    num_read = copy_pieces(entries, pieces, lambda *_: None, part_bytes=part_bytes)
    assert num_read == sum(piece.target.nbytes for piece in pieces)
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in entries.items()}
    is_split = {name: name == "lm_head.weight" or "proj" in name for name in sizes}
    halves = sum(size // 2 for name, size in sizes.items() if is_split[name])
    odd_row = 4 * config.hidden_size * (not config.tie_embeddings)  # of a vocabulary of 13
    assert num_read <= halves + odd_row + sum(size for name, size in sizes.items() if not is_split[name])
    due = load_shard(tmp_path, config, shard, dtype=torch.float32, device=CPU)
    down = [it.layers[1].linears[WeightName.DOWN].weight.dequantized() for it in (weights, due)]
    assert same(*down)
