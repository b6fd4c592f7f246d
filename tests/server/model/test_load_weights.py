"""Checkpoints to weights: every name and shape is checked, and what is wrong is named."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qualification.model.config import ModelConfig
from qualification.model.families.family import TensorNames
from server.errors import ModelError
from server.model.decoder import Decoder
from server.model.empty_weights import empty_weights
from server.model.linear import WeightName
from server.model.load.checkpoint import Piece, copy_pieces, read_entries, tenths
from server.model.load.load import load_config, load_decoder
from server.model.tensor_views import checkpoint_views
from server.settings import LoadFormat

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    views = checkpoint_views(empty_weights(config, torch.float32, CPU), config, TensorNames())
    return {name: torch.randn(view.values.shape, generator=generator) for name, view in views.items()}


def write(folder: Path, change: Callable[[dict[str, Tensor]], object] = len, **config: object) -> dict[str, Tensor]:
    """A checkpoint of CONFIG, its tensors changed before they are saved."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = random_tensors(load_config(folder))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def shard(folder: Path, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Decoder:
    return load_decoder(folder, load_config(folder), dtype=torch.float32, device=CPU, load_format=load_format)


def test_parts_stand_in_their_merged_weights(tmp_path: Path) -> None:
    tensors = write(tmp_path, attention_bias=True)
    layer = load(tmp_path).weights.layers[1]
    prefix = "model.layers.1"
    qkv = [tensors[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
    biases = [tensors[f"{prefix}.self_attn.{part}_proj.bias"] for part in "qkv"]
    gate_up = [tensors[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.qkv.weight.dequantized(), torch.cat(qkv))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat(biases))
    assert torch.equal(layer.linears[WeightName.GATE_UP].weight.dequantized(), torch.cat(gate_up))


Q_NORM = "model.layers.0.self_attn.q_norm.weight"
UNKNOWN = "not known to this architecture: "


@pytest.mark.parametrize(
    ("lost", "added", "message"),
    [
        ({Q_PROJ}, {}, f"missing: {Q_PROJ}"),
        (set(), {Q_NORM: torch.ones(4)}, UNKNOWN + Q_NORM),
        (set(), {Q_PROJ: torch.ones(8, 9)}, rf"{Q_PROJ} in model.safetensors: expected shape \(8, 8\), found \(8, 9\)"),
        ({"model.norm.weight"}, {"extra": torch.ones(1), Q_PROJ: torch.ones(1)},
            r"missing: model\.norm\.weight; not known .*: extra; .*q_proj.*\(1,\)"),
        (set(), {Q_PROJ: torch.ones(8, 8).to(torch.float8_e4m3fn)},
            f"{Q_PROJ}.*expected one of BF16, F16, F32, F64, found F8_E4M3"),
    ],
)  # fmt: skip
def test_every_wrong_tensor_is_named(tmp_path: Path, lost: set[str], added: dict[str, Tensor], message: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in lost:
            del tensors[name]
        tensors.update(added)

    write(tmp_path, spoil)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_frequencies_that_old_exporters_wrote_are_tolerated(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = write(tmp_path, lambda tensors: tensors.update({name: torch.ones(2)}))
    assert torch.equal(load(tmp_path).weights.head.weight.dequantized(), tensors["lm_head.weight"])


def test_the_head_of_tied_embeddings_is_the_embedding(tmp_path: Path) -> None:
    def repeat_embedding(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    write(tmp_path, repeat_embedding, tie_word_embeddings=True)
    weights = load(tmp_path).weights
    assert weights.head.weight.dequantized().data_ptr() == weights.embedding.data_ptr()


def test_another_head_beside_tied_embeddings_is_used(tmp_path: Path) -> None:
    """Fine-tuning leaves such files, and transformers 5 loads them: https://github.com/hiyouga/LLaMA-Factory/issues/10560."""
    other = {"lm_head.weight": torch.ones(11, 8)}
    tensors = write(tmp_path, lambda tensors: tensors.update(other), tie_word_embeddings=True)
    weights = load(tmp_path).weights
    assert torch.equal(weights.head.weight.dequantized(), tensors["lm_head.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])


def test_a_head_alone_is_the_tied_embedding_too(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    tensors = write(tmp_path, rename, tie_word_embeddings=True)
    weights = load(tmp_path).weights
    assert torch.equal(weights.embedding, tensors["lm_head.weight"])
    assert weights.head.weight.dequantized().data_ptr() == weights.embedding.data_ptr()


def test_numbers_of_64_bits_are_rounded_on_the_way(tmp_path: Path) -> None:
    tensors = write(tmp_path, lambda it: it.update({"model.norm.weight": it["model.norm.weight"].double()}))
    assert torch.equal(load(tmp_path).weights.final_norm, tensors["model.norm.weight"].float())


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    shard(tmp_path, tensors, {name: f"part-{n % 3}.safetensors" for n, name in enumerate(tensors)})
    assert torch.equal(load(tmp_path).weights.layers[1].qkv.weight.dequantized()[:8], tensors[Q_PROJ])


def write_index(folder: Path, places: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def swap(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Let the index name a file that does not hold the tensor."""
    write_index(folder, {name: f"part-{(n + (name == Q_PROJ)) % 2}.safetensors" for n, name in enumerate(tensors)})


def nest(folder: Path, _: object) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 200_000 + "]" * 200_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap, f"not in the file it names: {Q_PROJ}"),
        (lambda folder, _: (folder / "part-1.safetensors").unlink(),
            r"part-1\.safetensors does not exist, .* fetch the checkpoint again"),
        (lambda folder, tensors: save_file(tensors, folder / "part-1.safetensors"), r"is also in part-0\.safetensors"),
        (nest, r"index\.json: cannot be read as JSON"),
        *[
            (lambda folder, _, file=file: write_index(folder, {Q_PROJ: file}),
                r"must be in a \.safetensors file of this folder")
            for file in ("../other.safetensors", "/etc/passwd", "weights.bin", 3)
        ],
    ],
)  # fmt: skip
def test_damaged_shards_are_refused(
    tmp_path: Path, damage: Callable[[Path, dict[str, Tensor]], object], message: str
) -> None:
    tensors = write(tmp_path)
    shard(tmp_path, tensors, {name: f"part-{n % 2}.safetensors" for n, name in enumerate(tensors)})
    damage(tmp_path, tensors)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_config_that_the_system_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()  # root may read every file, but no folder as one
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: Is a directory$"):
        load(tmp_path)


def test_weights_that_the_system_refuses_are_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    name, open_file = "model.safetensors", Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> IO[Any]:  # root may read every file
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=rf"{name}: cannot be read: Permission denied$"):
        load(tmp_path)


def test_a_cut_file_or_one_of_pickles_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(tmp_path)


def test_dummy_weights_need_no_file_and_are_always_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, LoadFormat.DUMMY).weights for _ in range(2))
    for one, two in zip(first.layers, second.layers, strict=True):
        assert torch.equal(one.qkv.weight.dequantized(), two.qkv.weight.dequantized())
        assert 9e-4 < one.linears[WeightName.GATE_UP].weight.dequantized().abs().max() <= 1e-3
    assert not torch.equal(first.layers[0].qkv.weight.dequantized(), first.layers[1].qkv.weight.dequantized())


def test_threads_fill_every_target_and_count_every_byte(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    names = sorted(tensors)
    shard(tmp_path, tensors, {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)})
    entries = read_entries(tmp_path)
    targets = {name: torch.full(tensors[name].shape, torch.nan, dtype=torch.bfloat16) for name in names}
    told: list[tuple[int, int]] = []
    pieces = [Piece(name, target) for name, target in targets.items()]
    copy_pieces(entries, pieces, lambda done, total: told.append((done, total)), num_threads=3, part_bytes=200)
    for name in names:
        assert torch.equal(targets[name], tensors[name].bfloat16())
    total = sum(target.nbytes for target in targets.values())
    assert len(told) > 3
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)


@pytest.mark.parametrize("num_lost", [1, 100_000, None])
def test_a_file_that_shrinks_or_goes_during_a_load_is_named(tmp_path: Path, num_lost: int | None) -> None:
    write(tmp_path)
    entries = read_entries(tmp_path)
    file = tmp_path / "model.safetensors"
    last = max(entries, key=lambda name: entries[name].offset)
    if num_lost is None:
        file.unlink()
        message = r"model\.safetensors: cannot be read"
    else:
        size = max(0, file.stat().st_size - num_lost)
        os.truncate(file, size)
        message = rf"model\.safetensors: it ends at byte {size}, before its tensors do"
    with pytest.raises(ModelError, match=message):
        copy_pieces(entries, [Piece(last, torch.empty(entries[last].shape))], lambda *_: None)


def test_each_tenth_of_a_large_checkpoint_is_reported() -> None:
    told: list[str] = []
    progress = tenths(told.append)
    for done in range(0, 101):
        progress(done * 10**8, 10**10)
    assert len(told) == 10
    assert (told[0], told[-1]) == ("1.0 of 10.0 GB", "10.0 of 10.0 GB")
    tenths(told.append)(10**8, 10**8)
    assert len(told) == 10
