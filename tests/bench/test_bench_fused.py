"""Results of the bench of the fused ops."""

import pytest

from bench.attention.fused import MODELS, row


def test_a_row_has_the_rate_and_the_ratio_to_pytorch() -> None:
    found = row("matmul", 4_200_000, 2.0, 3.0, batch=1)
    assert found == {
        "op": "matmul", "batch": 1, "ours_us": 2.0, "torch_us": 3.0, "ratio": 1.5, "tb_per_second": 2.1
    }  # fmt: skip


def test_a_row_without_a_peer_has_no_ratio() -> None:
    assert row("sample", 8, 1.0, None)["ratio"] is None


@pytest.mark.parametrize(("index", "num_bytes"), [(0, 15_009_316_864), (1, 1_191_968_768)])
def test_step_reads_the_weights_of_its_model(index: int, num_bytes: int) -> None:
    model = MODELS[index]
    numbers = model.num_layers * sum(n * k for n, k in model.layer) + model.head[0] * model.head[1]
    assert numbers * 2 == num_bytes
