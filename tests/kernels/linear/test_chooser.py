"""The autotuner of algorithms: its file from start to start, and its rule for what is faster."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear.library.autotune import Autotuner, Measured, agrees, ranking
from kernels.linear.library.cublaslt import Algorithm, CublasLt, Prepared, Product
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.fallbacks import MatmulFallbacks

BF16, FP32 = torch.bfloat16, torch.float32


class OnPaper(CublasLt):
    """Takes every algorithm, and notes the first word of what it was asked for."""

    alignment_bytes = 16  # of memory of a CPU

    def __init__(self, version: int = 130100) -> None:
        self._version = version
        self.asked: list[int] = []

    @property
    def version(self) -> int:
        return self._version

    def prepared(self, product: Product, algorithm: Algorithm) -> Prepared | None:
        del product
        self.asked.append(algorithm.words[0])
        return Prepared(0, 0, 0, algorithm)


class Measuring:
    """Chooses the algorithm of words 1, 2, ... for 70 rows, and none for more; counts, and notes what it measured."""

    def __init__(self) -> None:
        self.num = 0
        self.sizes: list[int] = []

    def __call__(
        self, _library: CublasLt, _weights: Sequence[Tensor], _out: torch.dtype, sizes: Sequence[int]
    ) -> Measured:
        self.num += 1
        self.sizes += sizes
        chosen = Algorithm.of_words([self.num, 2**64 - 1, 3, 4, 5, 6, 7, 8])
        return {size: chosen if size == 70 else None for size in sizes}


def weight(size_out: int = 24) -> Tensor:
    return torch.zeros(size_out, 16, dtype=BF16)


def first_word(autotuner: Autotuner, size_out: int = 24, out: torch.dtype = BF16) -> int:
    sizes, choices = autotuner.choices([weight(size_out)], out, [70, 90])
    assert sizes == (size_out, 16, BF16, out)
    assert choices[90] is None
    assert choices[70] is not None
    return choices[70].words[0]


def test_a_shape_is_measured_once_and_kept_for_the_next_start(tmp_path: Path) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "new" / "products.json"
    autotuner = Autotuner(library, file, MatmulFallbacks(), measure=measure)
    shapes = [(24, BF16), (32, BF16), (24, FP32)]
    words = [first_word(autotuner, *shape) for shape in shapes]
    assert words == [1, 2, 3]
    assert [first_word(autotuner, *shape) for shape in shapes] == words
    again = Autotuner(library, file, MatmulFallbacks(), measure=measure)
    assert [first_word(again, *shape) for shape in shapes] == words
    assert measure.num == 3
    assert [path.name for path in file.parent.iterdir()] == ["products.json"]


def test_only_sizes_that_are_not_known_are_measured(tmp_path: Path) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "products.json"
    first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure))
    Autotuner(library, file, MatmulFallbacks(), measure=measure).choices([weight()], BF16, [70, 80, 90])
    assert measure.sizes == [70, 90, 80]


def test_another_version_of_the_library_is_measured_anew(tmp_path: Path) -> None:
    measure, file = Measuring(), tmp_path / "products.json"
    for version in (130100, 130200):
        library = OnPaper(version)
        first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure))
    assert measure.num == 2


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 130100}', '{"version": 130100, "algorithms": {"a": {"b": []}}}',
                '{"version": 130100, "algorithms": {"a": {"80": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}}',
                '{"version": 130100, "algorithms": {"a": {"80": ["x"]}}}']
)  # fmt: skip
def test_a_file_that_is_not_whole_is_replaced(tmp_path: Path, content: str) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "products.json"
    file.write_text(content)
    assert first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure)) == 1
    assert json.loads(file.read_text())["version"] == 130100
    assert first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure)) == 1


def test_a_write_error_is_logged_and_costs_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("in the way")
    library, measure = OnPaper(), Measuring()
    assert (
        first_word(Autotuner(library, tmp_path / "folder" / "products.json", MatmulFallbacks(), measure=measure)) == 1
    )
    assert "cannot be stored for the next start" in caplog.text


def test_concurrent_servers_store_all_measurements(tmp_path: Path) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "products.json"
    one, other = (Autotuner(library, file, MatmulFallbacks(), measure=measure) for _ in range(2))
    assert [first_word(one, 24), first_word(other, 32), first_word(one, 40)] == [1, 2, 3]
    again = Autotuner(library, file, MatmulFallbacks(), measure=measure)
    assert [first_word(again, size) for size in (24, 32, 40)] == [1, 2, 3]
    assert measure.num == 3


def test_the_algorithm_another_server_stored_is_used(tmp_path: Path) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "products.json"
    one, other = (Autotuner(library, file, MatmulFallbacks(), measure=measure) for _ in range(2))
    assert [first_word(it) for it in (one, other)] == [1, 1]
    assert measure.num == 2
    assert first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure)) == 1


def test_files_of_other_versions_are_never_mixed(tmp_path: Path) -> None:
    """All writers have the process id 1."""
    library, file = OnPaper(), tmp_path / "products.json"
    theirs = file.with_suffix(f".{os.getpid()}")
    theirs.write_text("half of")
    first_word(Autotuner(library, file, MatmulFallbacks(), measure=Measuring()))
    assert theirs.read_text() == "half of"


def test_a_file_that_cannot_be_looked_for_is_none(tmp_path: Path) -> None:
    """Use a loop of links: root may look into a folder without permission."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    too_long = tmp_path / ("x" * 300) / "products.json"
    for file in (tmp_path / "loop" / "products.json", too_long):
        library = OnPaper()
        assert first_word(Autotuner(library, file, MatmulFallbacks(), measure=Measuring())) == 1


def test_a_full_disk_keeps_no_half_of_a_file(tmp_path: Path) -> None:
    library, measure, file = OnPaper(), Measuring(), tmp_path / "products.json"
    file.mkdir()  # nothing can be put in its place
    assert first_word(Autotuner(library, file, MatmulFallbacks(), measure=measure)) == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("times", "order"),
    [([1.0], []), ([1.0, 0.99], []), ([1.0, 0.9, 1.1, 0.8], [3, 1]), ([2.0, 1.5, 1.5], [1, 2])],
)
def test_only_what_is_surely_faster_than_pytorch_is_chosen(times: list[float], order: list[int]) -> None:
    assert ranking(times) == order


@pytest.mark.parametrize("reason", [MatmulFallback.DISAGREES, MatmulFallback.ROWS_REFUSED])
def test_what_could_not_be_chosen_is_counted_at_every_start(tmp_path: Path, reason: MatmulFallback) -> None:
    def measure(_library: CublasLt, _weights: Sequence[Tensor], _out: torch.dtype, sizes: Sequence[int]) -> Measured:
        return {size: reason if size == 90 else None for size in sizes}

    for _ in range(2):
        fallbacks = MatmulFallbacks()
        autotuner = Autotuner(OnPaper(), tmp_path / "products.json", fallbacks, measure=measure)
        _, choices = autotuner.choices([weight()], BF16, [70, 80, 90])
        assert fallbacks.take() == {reason: 1}
        assert choices[90] is None
    kept = json.loads((tmp_path / "products.json").read_text())["algorithms"]
    assert [list(sizes) for sizes in kept.values()] == [["70", "80"]]


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (1.01, True), (1.1, False), (torch.nan, False)])
def test_a_result_beyond_rounding_is_refused_and_logged(
    caplog: pytest.LogCaptureFixture, factor: float, is_same: bool
) -> None:
    x, y = torch.ones(70, 16, dtype=BF16), torch.empty(70, 24, dtype=BF16)

    def call(x: Tensor, weight: Tensor, y: Tensor) -> None:
        y.copy_(factor * (x @ weight.t()))

    assert agrees(call, x, torch.ones(24, 16, dtype=BF16), y) is is_same
    assert ("of 70 rows differs from PyTorch's" in caplog.text) is not is_same
