"""A second format of weights plugs in by its class and a path: loaded, cut for ranks, proven, served and judged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape, parse_linear_shape
from kernels.linear.weights import PlainWeight
from kernels.system.device import read_fingerprint
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Book, Decision, Policy, decide
from qualification.decision.linear_shapes import linear_shapes_needed
from qualification.measure.checks.linear_checks import check_linear
from qualification.measure.faults.linear_faults import LinearFault, wrong_linear
from qualification.measure.inputs.linear_inputs import linear_cases, operands_of
from qualification.model.config import LinearFormats, ModelConfig
from qualification.model.families.registry import family_named
from qualification.model.shard import shard_of
from server.engine.operators.linear import LinearTable, ProductCall
from server.engine.operators.rows_table import StepSizes
from server.engine.proof.product_sample import take_product
from server.model.decoder import Decoder, Operators
from server.model.empty_weights import empty_weights
from server.model.layers import Weights
from server.model.linear import Linear, Product, WeightName
from server.model.load.load import load_config, load_shard
from server.model.step import Step
from server.model.tensor_views import checkpoint_views
from support.models.int8_weight import INT8, Int8Weight, int8_path, run_int8
from support.models.paged_runner import PagedRunner
from support.qualification_fakes import evidence

CPU = torch.device("cpu")
VALUES = {
    "model_type": "qwen2", "vocab_size": 13, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TORCH = next(path for path in LINEAR_PATHS if path.name == "torch.linear")
PATHS = (*LINEAR_PATHS, int8_path(TORCH))


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Save a checkpoint whose layers' products are bytes with scales."""
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    config = load_config(tmp_path)
    formats = LinearFormats(INT8, INT8, INT8, INT8)
    config = replace(config, layers=tuple(replace(layer, formats=formats) for layer in config.layers))
    names = family_named(config.family, "test").tensors
    assert names is not None
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, stored in checkpoint_views(empty_weights(config, torch.float32, CPU), config, names).items():
        like = stored.values
        if like.dtype is torch.int8:
            tensors[name] = torch.randint(-127, 128, like.shape, dtype=torch.int8, generator=random)
        else:
            of_scales = name.endswith("scale")
            tensors[name] = torch.rand(like.shape, generator=random) * (0.01 if of_scales else 1.0)
    save_file(tensors, tmp_path / "model.safetensors")
    return config


def weights_of(folder: Path, config: ModelConfig, rank: int = 0, world: int = 1) -> Weights:
    return load_shard(folder, config, shard_of(config, rank, world), dtype=torch.float32, device=CPU)


def plain(weights: Weights) -> Weights:
    """Return the same numbers in the plain format."""

    def changed(linear: Linear) -> Linear:
        return Linear(PlainWeight(linear.weight.dequantized().float()), linear.bias)

    def layer(it: Any) -> Any:
        fed = replace(it.feed_forward, gate_up=changed(it.feed_forward.gate_up), down=changed(it.feed_forward.down))
        return replace(it, qkv=changed(it.qkv), output=changed(it.output), feed_forward=fed)

    return replace(weights, layers=tuple(layer(it) for it in weights.layers))


def decisions_for(config: ModelConfig) -> dict[LinearShape, Decision[LinearShape]]:
    machine, found = read_fingerprint(CPU), {}
    for shape in linear_shapes_needed(config, Dtype.FP32, 64, "cpu"):
        own = {(shape, path.name): evidence(shape, path, fingerprint=machine) for path in PATHS}
        found[shape] = decide(
            shape, paths=PATHS, fingerprint=machine, book=Book(own=own), quarantined=frozenset(), policy=Policy.QUALIFY
        )
    return found


def test_a_model_of_the_format_answers_as_its_numbers(tmp_path: Path, config: ModelConfig) -> None:
    decisions = decisions_for(config)
    assert {it.path for it in decisions.values() if it.shape.weight_format == INT8} == {"torch.int8"}
    assert {it.path for it in decisions.values() if it.shape.weight_format != INT8} == {"torch.linear"}  # the head
    table, weights = LinearTable(decisions, PATHS), weights_of(tmp_path, config)
    served = Decoder(config, weights, operators=Operators(table.product))
    token_ids = torch.arange(40) % 13
    found = PagedRunner(served).logits(token_ids, [13, 1, 26])
    due = PagedRunner(Decoder(config, plain(weights))).logits(token_ids, [13, 1, 26])
    torch.testing.assert_close(found, due)
    counted = {(it.path, it.num_launches) for it in table.counts(StepSizes(13, 1, 1))}
    assert counted == {("torch.int8", 8), ("torch.linear", 1)}


@pytest.mark.parametrize("name", [WeightName.QKV, WeightName.OUTPUT, WeightName.GATE_UP, WeightName.DOWN])
def test_two_ranks_hold_the_whole(tmp_path: Path, config: ModelConfig, name: WeightName) -> None:
    whole = weights_of(tmp_path, config).layers[1].linears[name].weight.dequantized()
    parts = [weights_of(tmp_path, config, rank, 2).layers[1].linears[name].weight for rank in range(2)]
    assert all(isinstance(part, Int8Weight) for part in parts)
    if name in (WeightName.OUTPUT, WeightName.DOWN):
        assert torch.equal(torch.cat([part.dequantized() for part in parts], 1), whole)
        return
    sizes = [16, 8, 8] if name is WeightName.QKV else [12, 12]
    pairs = [part.split(sizes) for part in parts]
    together = [torch.cat([own[kind].dequantized() for own in pairs]) for kind in range(len(sizes))]
    assert torch.equal(torch.cat(together), whole)


def neighbours_scales(x: Tensor, weight: Int8Weight, *rest: Any) -> None:
    run_int8(x, Int8Weight(weight.codes, weight.scales.roll(1, 0)), *rest)


@pytest.mark.parametrize(("run", "is_right"), [(run_int8, True), (neighbours_scales, False)])
def test_a_path_of_the_format_is_proven_or_refused(run: Callable[..., None], is_right: bool) -> None:
    shape = parse_linear_shape("linear fp32 int8 in72 out40 bias r-le_8")
    cases = list(linear_cases(shape, operands_of(shape, CPU, seed=0), seed=0))
    assert isinstance(cases[0].operands.weight, Int8Weight)
    assert all(check.is_passed for check in check_linear(run, cases)) is is_right
    assert not all(check.is_passed for check in check_linear(wrong_linear(LinearFault.TAIL_COLUMNS_ZERO, shape), cases))


def test_a_shadow_check_judges_by_the_dequantised_numbers(tmp_path: Path, config: ModelConfig) -> None:
    table = LinearTable(decisions_for(config), PATHS)
    linear = weights_of(tmp_path, config).layers[0].qkv
    product = table.product(0, WeightName.QKV, linear, Epilogue.NONE)
    x, rng = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)), Random(0)
    out = product(x, None)
    assert take_product(ProductCall(product, x, out), "torch.int8", rng).judge(rng).is_mismatch is False
    assert take_product(ProductCall(product, x, out * 1.01), "torch.int8", rng).judge(rng).is_mismatch


def test_an_adapter_is_one_product_around_another(tmp_path: Path, config: ModelConfig) -> None:
    """It sees the step that it is part of."""
    weights, steps = plain(weights_of(tmp_path, config)), []

    def with_adapter(layer: int | None, name: WeightName, linear: Linear, epilogue: Any) -> Product:
        base = Operators().product(layer, name, linear, epilogue)

        def product(x: Tensor, step: Step | None, out: Tensor | None = None) -> Tensor:
            y = base(x, step, out)
            if name is WeightName.DOWN:
                assert step is not None
                steps.append(step)
                y += step.token_ids[:, None].eq(3)  # rows of one token get something added
            return y

        return product

    runner = PagedRunner(Decoder(config, weights, operators=Operators(with_adapter)))
    changed, due = (
        it.logits(torch.tensor([1, 2, 3, 4]), [4]) for it in (runner, PagedRunner(Decoder(config, weights)))
    )
    assert torch.equal(changed[:2], due[:2])
    assert not torch.equal(changed[2], due[2])
    assert len(steps) == config.num_layers
