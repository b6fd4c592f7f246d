"""The GPUs whose matrices are reviewed, and what is proven on each of them for a model, whatever machine this is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from qualification.decision.decision import Book, Policy, decide
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import plan_shapes
from qualification.evidence.matrix import MATRICES, load_matrices, load_matrix
from qualification.model.families.reader import read_model
from qualification.model.families.towers import with_known_tower
from qualification.model.shard import shard_of


@dataclass(frozen=True, slots=True)
class ReviewedGpu:
    """A GPU with a folder of matrices, its stack, and the evidence there."""

    folder: str
    fingerprint: Fingerprint
    book: Book


def reviewed_gpus(matrices: Path = MATRICES) -> tuple[ReviewedGpu, ...]:
    """Return every GPU with evidence, sorted by its folder's name. Raises MatrixError and OSError."""
    found = []
    for folder in sorted(it for it in matrices.iterdir() if it.is_dir()):
        first = next(iter(load_matrix(min(folder.glob("*.json"))).evidence.values()))
        found.append(ReviewedGpu(folder.name, first.fingerprint, Book(load_matrices(matrices, first.fingerprint))))
    return tuple(found)


def unproven_operators(
    config: Mapping[str, object], gpu: ReviewedGpu, paths: Sequence[AnyPath], num_ranks: int = 1
) -> list[Operator]:
    """Return the operators of which some shape of a model has no proven path on a GPU, under the default settings.

    config     a parsed config.json
    num_ranks  that share the model

    Raises ModelConfigError where so many cannot.
    """
    model = with_known_tower(read_model(config), config)
    device = gpu.fingerprint.device.value
    part = shard_of(model, 0, num_ranks).local_config
    shapes = plan_shapes(part, limits_of(model, device, Choices()), device, num_ranks)

    def is_proven(shape: AnyShape) -> bool:
        decision = decide(
            shape,
            paths=paths,
            fingerprint=gpu.fingerprint,
            book=gpu.book,
            quarantined=frozenset(),
            policy=Policy.REFUSE,
        )
        return decision.path is not None

    unproven = {operator_of(shape) for shape in shapes if not is_proven(shape)}
    return [operator for operator in EVERY_OPERATOR if operator in unproven]
