"""A step of few rows on a CPU gives what the general way gives."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_runner import PagedRunner

from server.model.config import ModelConfig
from server.model.cpu.small_step import SmallStep
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.layers import LayerWeights, Linear, Weights, empty_weights
from server.model.load.load import load_config
from server.settings import DEMO_MODEL

CPU = torch.device("cpu")
NUM_TOKENS = 120


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config() -> ModelConfig:
    return load_config(Path(DEMO_MODEL))


def weights_of(config: ModelConfig) -> Weights:
    """Values of 16 bits, which can be packed, of another power of two in each matrix."""
    torch.manual_seed(3)
    weights = empty_weights(config, torch.float32, CPU)
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.feed_forward_norm)]
    for norm in (*norms, weights.final_norm):
        norm.uniform_(0.5, 2)
    matrices = [it.weight for layer in weights.layers for it in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    for index, matrix in enumerate((*matrices, weights.embedding)):
        matrix.copy_(torch.randn_like(matrix).mul_(2.0 ** -(3 + index % 3)).bfloat16().float())
    return weights


def test_a_prompt_in_few_rows_at_a_time_has_the_logits_of_one_computed_whole(config: ModelConfig) -> None:
    weights = weights_of(config)
    small = SmallStep.of(config, weights.with_packed())
    kv = KVCache.allocate(config, 1, 1, torch.float32, CPU)
    assert small is not None
    assert small.takes(torch.zeros(8, dtype=torch.int64), kv)
    assert not small.takes(torch.zeros(NUM_TOKENS, dtype=torch.int64), kv)
    decoder, token_ids = Decoder(config, weights), torch.randint(config.vocab_size, (NUM_TOKENS,))
    expected = PagedRunner(decoder).logits(token_ids, [NUM_TOKENS])
    actual = PagedRunner(decoder).logits(token_ids, [1, 8, 41, 7, 2, 1, 60])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_model_with_biases_or_a_matrix_that_is_not_packed_is_computed_the_general_way(config: ModelConfig) -> None:
    weights = weights_of(config).with_packed()

    def with_last(layer: LayerWeights) -> Weights:
        return replace(weights, layers=(*weights.layers[:-1], layer))

    last = weights.layers[-1]
    biased = replace(last.qkv, bias=torch.zeros(last.qkv.weight.shape[0]))
    assert SmallStep.of(config, weights) is not None
    assert SmallStep.of(config, with_last(replace(last, qkv=biased))) is None
    assert SmallStep.of(config, with_last(replace(last, down=Linear(last.down.weight, None)))) is None
    assert SmallStep.of(replace(config, qk_norm=True), weights) is None


def test_a_cache_of_another_dtype_is_written_the_general_way(config: ModelConfig) -> None:
    small = SmallStep.of(config, weights_of(config).with_packed())
    assert small is not None
    assert not small.takes(torch.zeros(8, dtype=torch.int64), KVCache.allocate(config, 1, 1, torch.float16, CPU))


def run_elsewhere(lines: list[str]) -> None:
    """In a process of its own, whose torch may be changed."""
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_where_torch_has_no_fbgemm_the_model_is_served_by_the_general_way() -> None:
    lines = [
        "import torch",
        "del torch.fbgemm_linear_fp16_weight_fp32_activation",
        "from server.model.decoder import Decoder",
        "from kernels.linear.packed import packed",
        "assert packed(torch.ones(64, 64)) is None",
    ]
    run_elsewhere(lines)


def test_where_torch_multiplies_into_no_given_memory_the_model_is_served_by_the_general_way() -> None:
    lines = [
        "import torch",
        "product = torch.fbgemm_linear_fp16_weight_fp32_activation",
        "torch.fbgemm_linear_fp16_weight_fp32_activation = lambda x, panels, bias: product(x, panels, bias)",
        "from pathlib import Path",
        "from server.model.layers import empty_weights",
        "from server.model.load.load import load_config",
        "from server.model.cpu.small_step import SmallStep",
        "from server.settings import DEMO_MODEL",
        "config = load_config(Path(DEMO_MODEL))",
        "weights = empty_weights(config, torch.float32, torch.device('cpu'))",
        "matrices = [m.weight.fill_(1) for l in weights.layers for m in (l.qkv, l.output, l.gate_up, l.down)]",
        "weights = weights.with_packed()",
        "assert weights.layers[0].qkv.packed is not None",
        "assert SmallStep.of(config, weights) is None",
    ]
    run_elsewhere(lines)
