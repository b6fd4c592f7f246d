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
from kernels.linear.library.autotune import Autotuner, Measured
from kernels.linear.library.cublaslt import CublasLtError, load_library
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.library.library_path import Choices, RunMeasured, Sizes
from kernels.linear.shape import PLAIN
from kernels.vocabulary.shape import Dtype
from server.engine.startup.limits import EngineLimits
from server.engine.startup.matmul_tuning import choices_of, choose_products, measure_nothing
from server.model.layers import DenseWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Linear
from server.model.load.load import load_config
from server.protocol.messages import EngineReady, FromEngine
from server.settings import DEMO_MODEL

BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
DEVICE = torch.device("cpu", 0)  # with an index, for which no CUDA is asked
LIMITS = EngineLimits(Dtype.BF16, Dtype.BF16, 2048, 8, 2048, 2048, page_size=16)
SIZE = 1024  # a weight of so many rows and columns is just worth it
SIZES = [72, 256, 1024, 2048]


class OnPaper(Autotuner):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int, torch.dtype, list[int]]] = []

    def choices(
        self, weights: Sequence[Tensor], dtype_out: torch.dtype, num_rows: Sequence[int]
    ) -> tuple[Sizes, Choices]:
        size_out, size_in = weights[0].shape
        self.asked.append(((size_out, size_in), len(weights), dtype_out, list(num_rows)))
        return (size_out, size_in, weights[0].dtype, dtype_out), dict.fromkeys(num_rows)


def asked_for(weights: Weights, num_rows: Sequence[int] = SIZES) -> list[tuple[object, ...]]:
    """Return what is measured: (shape, number of weights, dtype of the sums, numbers of rows) of each."""
    autotuner = OnPaper()
    found = choices_of(weights, autotuner, num_rows)
    assert {sizes[:2] for sizes in found} == {shape for shape, *_ in autotuner.asked}
    return [*autotuner.asked]


def linear(size_in: int, size_out: int, has_bias: bool = False, dtype: torch.dtype = BF16) -> Linear:
    return Linear.empty(size_in, size_out, has_bias, PLAIN, dtype, CPU)


def weights_of(num_layers: int, dtype: torch.dtype = BF16, *, has_bias: bool = False) -> Weights:
    layer = LayerWeights(
        attention_norm=torch.ones(SIZE),
        qkv=linear(SIZE, 2 * SIZE, has_bias, dtype),
        q_norm=None,
        k_norm=None,
        output=linear(SIZE, SIZE, False, dtype),
        feed_forward_norm=torch.ones(SIZE),
        feed_forward=DenseWeights(  # the first one is too small
            linear(SIZE, SIZE // 2, False, dtype), linear(2 * SIZE, SIZE, False, dtype)
        ),
    )
    head = linear(SIZE, 3 * SIZE, False, dtype)
    return Weights(torch.ones(3), (layer,) * num_layers, torch.ones(SIZE), head)


def test_weights_of_all_layers_share_measurements_of_some() -> None:
    shapes = [(2 * SIZE, SIZE), (SIZE, SIZE), (SIZE, 2 * SIZE)]
    assert asked_for(weights_of(12))[:3] == [(shape, 8, BF16, SIZES) for shape in shapes]


def test_a_router_is_never_left_to_pytorch_by_one_rank_alone() -> None:
    """All ranks have the whole router: another rounding on one of them could choose other experts there."""
    mixture = MixtureWeights(
        router=linear(SIZE, 5 * SIZE),
        experts=ExpertWeights(torch.empty(0, dtype=BF16), torch.empty(0, dtype=BF16)),
        shared=DenseWeights(linear(SIZE, 2 * SIZE), linear(SIZE, SIZE)),
    )
    dense = weights_of(1)
    asked = asked_for(replace(dense, layers=(replace(dense.layers[0], feed_forward=mixture),)))
    assert (5 * SIZE, SIZE) not in [shape for shape, *_ in asked]
    assert (2 * SIZE, SIZE) in [shape for shape, *_ in asked]


def test_the_head_is_measured_for_rows_that_are_sampled_at_once() -> None:
    head = 3 * SIZE, SIZE
    assert asked_for(weights_of(1))[-1] == (head, 1, torch.float32, [72, 256])
    assert head not in [shape for shape, *_ in asked_for(weights_of(1), [2048])]


def test_weights_of_32_bits_and_those_with_a_bias_stay_pytorchs() -> None:
    assert asked_for(weights_of(1, torch.float32)) == []
    assert (2 * SIZE, SIZE) not in [shape for shape, *_ in asked_for(weights_of(1, has_bias=True))]


class Library(ctypes.CDLL):
    """Answers every call with one status."""

    def __init__(self, status: int = 0) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self._status


class Start:
    """The choice of a start of a model that has a head alone. What it measures fails by `error`."""

    def __init__(self, folder: Path, error: Exception | None = None, *, is_first: bool = True) -> None:
        self.file = folder / "products.json"
        self.fallbacks = MatmulFallbacks()
        self.run = RunMeasured(self.fallbacks.note)
        self._error = error
        self._measure = self._fail if is_first else measure_nothing

    def __call__(self, load: Callable[[], ctypes.CDLL] = load_library) -> dict[MatmulFallback, int]:
        """Return what is left to PyTorch."""
        config = load_config(Path(DEMO_MODEL))
        choose_products(
            weights_of(0), config, LIMITS, self.file, DEVICE, self.run, self.fallbacks, measure=self._measure, load=load
        )
        return self.fallbacks.take()

    def store(self) -> None:
        """Store that of all that LIMITS ask for PyTorch's was the fastest."""
        kept = {f"{3 * SIZE} x {SIZE} {BF16} {FP32}": dict.fromkeys(range(65, 2049))}
        self.file.write_text(json.dumps({"version": 0, "algorithms": kept}))

    @property
    def has_head(self) -> bool:
        return (3 * SIZE, SIZE, BF16, FP32) in self.run.choices

    def _fail(self, *_: object) -> Measured:
        assert self._error is not None, "nothing is to be measured"
        raise self._error


def missing() -> Library:
    raise CublasLtError("libcublasLt.so.13: not found")


@pytest.mark.parametrize(
    ("load", "error", "reason", "is_first"),
    [
        (missing, None, MatmulFallback.LIBRARY_MISSING, True),
        (missing, None, MatmulFallback.LIBRARY_MISSING, False),  # on another rank
        (lambda: Library(1), None, MatmulFallback.LIBRARY_REFUSED, True),
        (lambda: Library(1), None, MatmulFallback.LIBRARY_REFUSED, False),
        (Library, CublasLtError("cublasLtMatmul returned 14"), MatmulFallback.LIBRARY_REFUSED, True),
        (Library, torch.OutOfMemoryError("tried to allocate"), MatmulFallback.OUT_OF_MEMORY, True),
        (Library, RuntimeError("no such thing"), MatmulFallback.MEASURE_FAILED, True),
    ],
)
def test_what_is_left_to_pytorch_has_a_reason_in_the_log(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    load: Callable[[], Library],
    error: Exception | None,
    reason: MatmulFallback,
    is_first: bool,
) -> None:
    start = Start(tmp_path, error, is_first=is_first)
    with caplog.at_level(logging.WARNING):
        assert start(load) == {reason: 1}
    assert f"PyTorch's algorithms ({reason.value})" in caplog.text
    assert not start.has_head
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_first", [True, False])
def test_what_was_chosen_is_no_fallback(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_first: bool) -> None:
    """On other ranks too, which take what the first one has stored."""
    start = Start(tmp_path, is_first=is_first)
    start.store()
    assert start(Library) == {}
    assert start.has_head
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_ranks_count_what_the_first_one_stored_nothing_for(tmp_path: Path) -> None:
    """A head of other rows too, and all where rank 0's disk is full."""
    assert [*Start(tmp_path, is_first=False)(Library)] == [MatmulFallback.MEASURE_FAILED]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch ships the library")
def test_a_torch_without_cuda_has_no_library(tmp_path: Path) -> None:
    assert Start(tmp_path)() == {MatmulFallback.LIBRARY_MISSING: 1}


def test_reasons_cross_the_socket() -> None:
    counts = {MatmulFallback.MEASURE_FAILED: 1, MatmulFallback.DISAGREES: 3}
    ready = EngineReady(1, "m", 300, 100, 16, {}, None, "valid", [], 4, matmul_fallbacks=counts)
    sent = msgspec.msgpack.encode(ready)
    assert msgspec.msgpack.decode(sent, type=FromEngine) == ready
