"""Queries, keys and values as one tensor of 8 bits in shards: read as they lie, cut for ranks, proven, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qualification.model.config import ModelConfig
from qualification.model.shard import shard_of
from server.errors import ModelError
from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder, load_shard
from server.settings import LoadFormat
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.mimo import save_sharded
from support.models.paged_runner import PagedRunner
from support.models.tiny_families import CPU, TOLERANCE, prompt, reference_logits

SCALES = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"


def loaded(folder: Path, config: ModelConfig) -> Decoder:
    return load_decoder(folder, config, dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)


def exchanged(tensors: Tensors) -> Tensors:
    """Exchange the two shards of each layer, with their scales."""
    return {
        name: torch.cat(values.view(torch.uint8).chunk(2)[::-1]).view(values.dtype) if ".qkv_proj." in name else values
        for name, values in tensors.items()
    }


def test_logits_are_those_of_the_numbers_in_the_shards(tmp_path: Path) -> None:
    model, token_ids = save_sharded(tmp_path), prompt(40)
    config, expected = load_config(tmp_path), reference_logits(model, token_ids)
    found = PagedRunner(loaded(tmp_path, config)).logits(token_ids, [13, 20, 7])
    assert (found - expected).abs().max() <= TOLERANCE


def test_ranks_have_their_heads_rows(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    config = load_config(tmp_path)
    whole = loaded(tmp_path, config).weights
    ranks = [load_shard(tmp_path, config, shard_of(config, it, 2), dtype=torch.float32, device=CPU) for it in range(2)]
    for index, layer in enumerate(config.layers):
        sizes = layer.attention.part_sizes
        of_whole = whole.layers[index].mixed_by[0].weight.stored["weight"].values.split(sizes)
        of_ranks = [
            it.layers[index].mixed_by[0].weight.stored["weight"].values.split([size // 2 for size in sizes])
            for it in ranks
        ]
        for part, own in zip(of_whole, zip(*of_ranks, strict=True), strict=True):
            assert torch.equal(part, torch.cat(own))


def test_the_check_of_layers_names_shards_in_another_order(tmp_path: Path) -> None:
    save_sharded(tmp_path / "model")
    subject = CheckedLayers.made(tmp_path / "model")
    right = subject.check()
    assert right.first is None, str(right.first)
    other = edited(tmp_path / "model", tmp_path / "other", change=exchanged)
    found = subject.check(loaded(other, subject.subject.config)).first
    assert found is not None
    assert (found.section, found.layer) == ("queries", 0)


def test_files_in_another_layout_are_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, config = load_file(file), json.loads(path.read_text())
    save_file(tensors | {SCALES: tensors[SCALES][:3]}, file)
    shapes = r"of 2 shards of 176 rows, F32 or BF16 \(4, 2\) was expected, found F32 \(3, 2\)"
    with pytest.raises(ModelError, match=shapes):
        loaded(tmp_path, load_config(tmp_path))
    save_file({name: it for name, it in tensors.items() if name != SCALES}, file)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.qkv_proj\.weight_scale_inv missing: fetch"):
        loaded(tmp_path, load_config(tmp_path))
    quantization = config.pop("quantization_config")
    for changed in ({}, {"quantization_config": {**quantization, "weight_block_size": None}}):
        path.write_text(json.dumps(config | changed))
        with pytest.raises(ModelError, match="layout must be absent or split, but of weights of fp8 in blocks of 128"):
            load_config(tmp_path)
    path.write_text(json.dumps(config | {"quantization_config": quantization, "swa_num_key_value_heads": 1}))
    with pytest.raises(ModelError, match=r"swa_num_key_value_heads must be a multiple of num_key_value_heads \(2\)"):
        load_config(tmp_path)
