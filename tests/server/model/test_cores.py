"""How many cores a step takes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.model.config import ModelConfig
from server.model.cpu.cores import Cores
from server.model.layers import Weights, empty_weights
from server.model.load.load import load_config
from server.settings import DEMO_MODEL


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def weights_of(config: ModelConfig, device: str = "cpu") -> Weights:
    return empty_weights(config, torch.float32, torch.device(device))


def num_cores(cores: Cores, num_rows: int) -> int:
    cores.take(num_rows)
    return torch.get_num_threads()


def test_small_steps_of_a_small_model_take_one_core_and_large_ones_all() -> None:
    cores = Cores(weights_of(load_config(Path(DEMO_MODEL))))
    assert [num_cores(cores, num_rows) for num_rows in (8, 512, 1, 102, 103)] == [1, 2, 1, 1, 2]


def test_a_large_model_takes_all_cores_for_one_row() -> None:
    large = replace(load_config(Path(DEMO_MODEL)), hidden_size=1024, intermediate_size=3072, num_layers=1)
    assert num_cores(Cores(weights_of(large)), 1) == 2
