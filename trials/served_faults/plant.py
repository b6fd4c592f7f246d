"""A planted fault: one behaviour of a running engine that is another one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kernels.vocabulary.path import RunAttention
from qualification.model.config import ModelConfig
from server.engine.execution.grammars import Grammars
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampler import Sampler
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch, Sequence
from server.model.decoder import Decoder, Operators
from server.model.layers import Weights
from server.model.ranks import Ranks
from support.engine.checked_layers import Tensors
from support.engine.serving_faults import Edit

RunProduct = Callable[..., None]  # x, weight, bias, epilogue, out
RunExperts = Callable[..., None]  # hidden, experts, weights, expert_weights, activation, out


class MakeDecoder(Protocol):
    def __call__(self, config: ModelConfig, weights: Weights, ranks: Ranks, operators: Operators) -> Decoder: ...


class Model(Enum):
    """A served model."""

    LLAMA = "llama"  # with biases, and rotations that are scaled
    WINDOWED = "mistral"
    MIXTURE = "glm4_moe"  # norms of queries and keys, groups of experts, a correction bias, a shared expert


class Kind(Enum):
    """The part of an engine that a fault is in."""

    ATTENTION = "attention"
    PRODUCTS = "products"
    EXPERTS = "experts"
    BATCH = "step buffers and batches"
    PAGES = "pages"
    FORKS = "forks"
    SAMPLING = "sampling"
    NORM = "norm"
    RESIDUAL = "residual"
    ROTATION = "rotation"
    CACHE = "cache writes"
    EMBEDDING = "embedding and head"
    ROUTER = "router"
    LOADER = "loader"


def same(value: Any) -> Any:
    """Return what is given."""
    return value


def same_model(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """Return what is given."""
    return config, weights


@dataclass(frozen=True)
class Plant:
    """Replacements of parts of an engine; whatever is not named stays.

    attention, product, experts  make of a path's call the one that is launched in its place
    tensors   makes of the checkpoint's tensors those that are loaded
    model     makes of configuration and weights those that the decoder is built of
    decoder   builds the decoder
    buffer    edits step buffers of several decode rows
    batch, during, result  as of `BrokenRunner`
    queued    is called with each sequence that is queued
    sampler   chooses and scores tokens
    grammars  make the masks of those that they are given
    step      is called with the runner before each step
    """

    attention: Callable[[RunAttention], RunAttention] = same
    product: Callable[[RunProduct], RunProduct] = same
    experts: Callable[[RunExperts], RunExperts] = same
    tensors: Callable[[Tensors], Tensors] | None = None
    model: Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]] = same_model
    decoder: MakeDecoder = Decoder
    buffer: Edit | None = None
    batch: Callable[[Batch], Batch] = same
    during: Callable[[Batch], AbstractContextManager[object]] = lambda _: nullcontext()
    result: Callable[[StepResult], StepResult] = same
    queued: Callable[[Sequence], None] = lambda _: None
    sampler: Sampler | None = None
    grammars: Callable[[Grammars], Grammars] = same
    step: Callable[[ModelRunner], None] = lambda _: None


@dataclass(frozen=True)
class Fault:
    """A fault by its name.

    plant  makes what is replaced, anew for each engine: some faults count
    most_answers  that are computed again before it counts as unseen by replays
    """

    name: str
    kind: Kind
    plant: Callable[[], Plant]
    model: Model = Model.LLAMA
    most_answers: int = 40
    num_pages: int = 64
    asks: tuple[str, ...] = ()
