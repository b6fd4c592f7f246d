"""Tuned products of a model: the weights and numbers of rows that have one, and failures."""

import ctypes
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.experts.weights import ExpertWeights
from kernels.linear.autotune import Autotuner
from kernels.linear.cublaslt import CublasLt, CublasLtError
from kernels.linear.fallbacks import MatmulFallback
from kernels.linear.tuned import TunedProduct
from kernels.vocabulary.shape import Dtype
from server.engine.startup.limits import EngineLimits
from server.engine.startup.matmul_tuning import choose_products, take_products
from server.model.decoder import Decoder
from server.model.layers import DenseWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Dense, Tuned
from server.model.load.load import load_config
from server.protocol.messages import EngineReady, FromEngine
from server.settings import DEMO_MODEL

BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
DEVICE = torch.device("cpu", 0)  # with an index, for which no CUDA is asked
LIMITS = EngineLimits(Dtype.BF16, Dtype.BF16, 2048, 8, 2048, 2048, page_size=16)
SIZE = 1024  # a weight of so many rows and columns is just worth it
SIZES = [72, 256, 1024, 2048]
KEPT = dict.fromkeys(range(65, 2049))  # of all that LIMITS ask for PyTorch's was the fastest


class OnPaper(Autotuner):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int, torch.dtype, list[int]]] = []

    def product(self, weights: Sequence[Tensor], dtype_out: torch.dtype, sizes: Sequence[int]) -> TunedProduct:
        shape = weights[0].shape
        self.asked.append((tuple(shape), len(weights), dtype_out, list(sizes)))
        return TunedProduct(CublasLt.__new__(CublasLt), (shape[0], shape[1]), (weights[0].dtype, dtype_out), {})


def weights_of(num_layers: int, dtype: torch.dtype = BF16, *, has_bias: bool = False) -> Weights:
    def linear(size_in: int, size_out: int, has_bias: bool = False) -> Dense:
        return Dense.empty(size_in, size_out, has_bias, dtype, CPU)

    layer = LayerWeights(
        attention_norm=torch.ones(SIZE),
        qkv=linear(SIZE, 2 * SIZE, has_bias),
        q_norm=None,
        k_norm=None,
        output=linear(SIZE, SIZE),
        feed_forward_norm=torch.ones(SIZE),
        feed_forward=DenseWeights(linear(SIZE, SIZE // 2), linear(2 * SIZE, SIZE)),  # the first one is too small
    )
    return Weights(torch.ones(3), (layer,) * num_layers, torch.ones(SIZE), linear(SIZE, 3 * SIZE).weight)


def test_weights_of_all_layers_share_measurements_of_some() -> None:
    autotuner = OnPaper()
    weights = weights_of(12).with_tuned(autotuner, SIZES)
    shapes = [(2 * SIZE, SIZE), (SIZE, SIZE), (SIZE, 2 * SIZE)]
    assert autotuner.asked[:3] == [(shape, 8, BF16, SIZES) for shape in shapes]
    first, last = weights.layers[0], weights.layers[-1]
    assert len(weights.layers) == 12
    assert type(first.linears["gate_up"]) is type(last.linears["gate_up"]) is Dense
    for one, other in (
        (first.qkv, last.qkv),
        (first.output, last.output),
        (first.linears["down"], last.linears["down"]),
    ):
        assert isinstance(one, Tuned)
        assert isinstance(other, Tuned)
        assert one.products is other.products is not None


def test_a_router_is_never_left_to_pytorch_by_one_rank_alone() -> None:
    """All ranks have the whole router: another rounding on one of them could choose other experts there."""

    def linear(size_in: int, size_out: int) -> Dense:
        return Dense.empty(size_in, size_out, False, BF16, CPU)

    mixture = MixtureWeights(
        router=linear(SIZE, SIZE),
        experts=ExpertWeights(torch.empty(0, dtype=BF16), torch.empty(0, dtype=BF16)),
        shared=DenseWeights(linear(SIZE, 2 * SIZE), linear(SIZE, SIZE)),
    )
    dense = weights_of(1)
    weights = replace(dense, layers=(replace(dense.layers[0], feed_forward=mixture),)).with_tuned(OnPaper(), SIZES)
    tuned = weights.layers[0].feed_forward
    assert isinstance(tuned, MixtureWeights)
    assert tuned.shared is not None
    assert type(tuned.router) is Dense
    assert type(tuned.shared.gate_up) is type(tuned.shared.down) is Tuned


def test_the_head_is_measured_for_rows_that_are_sampled_at_once() -> None:
    autotuner = OnPaper()
    assert weights_of(1).with_tuned(autotuner, SIZES).chosen_head is not None
    assert autotuner.asked[-1] == ((3 * SIZE, SIZE), 1, torch.float32, [72, 256])
    assert weights_of(1).with_tuned(autotuner, [2048]).chosen_head is None


def test_weights_of_32_bits_and_those_with_a_bias_stay_pytorchs() -> None:
    autotuner = OnPaper()
    single = weights_of(1, torch.float32).with_tuned(autotuner, SIZES)
    assert autotuner.asked == []
    assert type(single.layers[0].qkv) is Dense
    assert single.chosen_head is None
    assert type(weights_of(1, has_bias=True).with_tuned(autotuner, SIZES).layers[0].qkv) is Dense


class Library(ctypes.CDLL):
    """Answers every call with one status."""

    def __init__(self, status: int = 0) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self._status


class Failing(Decoder):
    """Fails when it is to measure."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(load_config(Path(DEMO_MODEL)), weights_of(0))
        self._error = error

    def choose_products(self, autotuner: Autotuner, sizes: Sequence[int]) -> None:
        if self._error is not None:
            raise self._error
        super().choose_products(autotuner, sizes)


def missing() -> Library:
    raise CublasLtError("libcublasLt.so.13: not found")


REASONS = pytest.mark.parametrize(
    ("load", "error", "reason"),
    [
        (missing, None, MatmulFallback.LIBRARY_MISSING),
        (lambda: Library(1), None, MatmulFallback.LIBRARY_REFUSED),
        (Library, CublasLtError("cublasLtMatmul returned 14"), MatmulFallback.LIBRARY_REFUSED),
        (Library, torch.OutOfMemoryError("tried to allocate"), MatmulFallback.OUT_OF_MEMORY),
        (Library, RuntimeError("no such thing"), MatmulFallback.MEASURE_FAILED),
    ],
)


@REASONS
def test_what_is_left_to_pytorch_has_a_reason_in_the_log(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    load: Callable[[], Library],
    error: Exception | None,
    reason: MatmulFallback,
) -> None:
    decoder = Failing(error)
    with caplog.at_level(logging.WARNING):
        fallbacks = choose_products(decoder, LIMITS, tmp_path / "products.json", DEVICE, load=load)
    assert fallbacks.take() == {reason: 1}
    assert fallbacks.take() == {}
    assert f"PyTorch's algorithms ({reason.value})" in caplog.text
    assert decoder.weights.chosen_head is None
    assert not list(tmp_path.iterdir())


def test_what_was_chosen_is_no_fallback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "products.json"
    Path(file).write_text(json.dumps({"version": 0, "algorithms": {f"{3 * SIZE} x {SIZE} {BF16} {FP32}": KEPT}}))
    decoder = Failing(None)
    assert choose_products(decoder, LIMITS, file, DEVICE, load=Library).take() == {}
    assert decoder.weights.chosen_head is not None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch ships the library")
def test_a_torch_without_cuda_has_no_library(tmp_path: Path) -> None:
    found = choose_products(Failing(None), LIMITS, tmp_path / "products.json", DEVICE)
    assert found.take() == {MatmulFallback.LIBRARY_MISSING: 1}


def test_reasons_cross_the_socket() -> None:
    counts = {MatmulFallback.MEASURE_FAILED: 1, MatmulFallback.DISAGREES: 3}
    ready = EngineReady(1, "m", 300, 100, 16, {}, None, "valid", [], 4, matmul_fallbacks=counts)
    sent = msgspec.msgpack.encode(ready)
    assert msgspec.msgpack.decode(sent, type=FromEngine) == ready


def test_other_ranks_take_what_the_first_one_measured(tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    Path(file).write_text(json.dumps({"version": 0, "algorithms": {f"{3 * SIZE} x {SIZE} {BF16} {FP32}": KEPT}}))
    decoder = Failing(None)
    assert take_products(decoder, LIMITS, file, DEVICE, load=Library).take() == {}
    assert decoder.weights.chosen_head is not None


def test_other_ranks_count_what_the_first_one_stored_nothing_for(tmp_path: Path) -> None:
    """A head of other rows too, and all where rank 0's disk is full."""
    left = take_products(Failing(None), LIMITS, tmp_path / "absent.json", DEVICE, load=Library)
    assert [*left.take()] == [MatmulFallback.MEASURE_FAILED]


@REASONS
def test_what_another_rank_leaves_to_pytorch_has_a_reason(
    tmp_path: Path, load: Callable[[], Library], error: Exception | None, reason: MatmulFallback
) -> None:
    decoder = Failing(error)
    assert take_products(decoder, LIMITS, tmp_path / "products.json", DEVICE, load=load).take() == {reason: 1}
    assert decoder.weights.chosen_head is None
