"""`hallmark models`: the published models that are served, the GPUs that they fit, and what is proven there."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath
from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command
from qualification.common.table import table
from qualification.decision.presets import preset_named
from qualification.decision.reviewed import ReviewedGpu, reviewed_gpus, unproven_operators
from qualification.model.families.family import ExpertLayout, Family
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.quantization_config import CONFIG_KEY
from qualification.model.families.registry import FAMILIES, nearest
from qualification.model.shard import TENSOR_PARALLEL_SIZES
from server.cli.published import PUBLISHED, Measured, PublishedModel, Stored
from server.errors import SettingsError

_SHARE = 0.9  # of a GPU's memory, as --gpu-memory-utilization has it
_LEAST_REST = 0.05, 1.0  # share of the weights, and GB, that the KV cache and a step take at the least
_NONE = "none"
_AT_START = "at start"  # the server proves it itself, under --on-unproven qualify
# Families whose files of 8 bits, as they are published or saved, have a layer's experts in one tensor.
_SHARED_IN_8_BITS = ("qwen3_vl_moe_text", "step3p5", "granitemoe", "granitemoeshared", "granitemoehybrid")
HEAD = ("model", "class", "billion", "formats", "calls")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: its short name, its memory, and what was proven on it."""

    name: str
    gigabytes: int
    reviewed: ReviewedGpu


# Memory of the GPUs that have matrices, by their folders.
_GIGABYTES = {"nvidia-h100-80gb-hbm3": ("H100", 80), "nvidia-h200": ("H200", 141)}


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of the matrices that ship."""
    return tuple(Gpu(*_GIGABYTES[it.folder], it) for it in reviewed_gpus())


def add_parser(commands: Commands) -> None:
    """Add `hallmark models` to the commands of the program."""
    parser = add_command(
        commands,
        "models",
        "list the models that are served, and the GPUs that they fit",
        "List published models of the classes that are served: formats, GPUs that each fits and what is proven there, "
        "format of calls, measured times. docs/models.md has the same table, and says what it means.",
        "hallmark models",
        "hallmark models qwen3",
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="only those whose name or class holds it")


def run(args: argparse.Namespace) -> int:
    """Print the table and return the exit code. Raises SettingsError where no model has the name."""
    from kernels.catalog import ALL_PATHS  # imports torch

    wanted = args.name.lower()
    models = [it for it in PUBLISHED if wanted in it.name.lower() or wanted in it.architecture.lower()]
    if not models:
        raise SettingsError(f"no model of the list has {args.name} in its name or class: {nearest(args.name, None)}")
    known = gpus()
    for line in table(head_of(known), [row_of(it, known, ALL_PATHS) for it in models]):
        print(line, flush=True)
    return ExitCode.PASS


def head_of(known: Sequence[Gpu]) -> tuple[str, ...]:
    """The names of the columns."""
    return (*HEAD, *(f"{gpu.name} {gpu.gigabytes} GB" for gpu in known), "first token of 2k, a token")


def row_of(model: PublishedModel, known: Sequence[Gpu], paths: Sequence[AnyPath]) -> tuple[str, ...]:
    """The cells of a model."""
    return (
        model.name,
        model.architecture,
        f"{model.billions:.3g}" if model.billions < 999.5 else f"{model.billions:.0f}",
        formats_of(model),
        model.calls.value if model.calls is not None else _NONE,
        *(_on(model, gpu, paths) for gpu in known),
        _times(model.measured),
    )


def family_of(architecture: str) -> Family:
    """The family that reads a class; of a model that also sees images, the first of its text parts.

    Of several families that read it, the one that names it first. Raises KeyError for a class that is not served.
    """
    named = [it for it in FAMILIES if architecture in it.architectures]
    if named:
        return min(named, key=lambda it: it.architectures.index(architecture))
    for model in IMAGE_MODELS:
        if architecture in model.architectures:
            return next(it for it in FAMILIES if it.model_type == model.families[0])
    raise KeyError(architecture)


def formats_of(model: PublishedModel) -> str:
    """The formats of weights in which a checkpoint of a model is read."""
    family = family_of(model.architecture)
    has_experts = family.tensors is not None and family.tensors.experts is not None
    if model.stored is Stored.MXFP4:
        return "mxfp4"
    is_read = CONFIG_KEY not in family.keys.refused
    if is_read and (not has_experts or _has_quantised_experts(family)):
        return "bf16, fp8, int4"
    if is_read and family.model_type in _SHARED_IN_8_BITS:
        return "bf16, fp8"
    return "bf16 (published in fp8)" if model.stored is Stored.FP8 else "bf16"


def _has_quantised_experts(family: Family) -> bool:
    """Return whether experts may have 8 or 4 bits: where each matrix is a tensor."""
    names = family.tensors
    return names is not None and names.experts is not None and names.experts.layout is ExpertLayout.EACH


def num_gpus(model: PublishedModel, gigabytes: int) -> int | None:
    """Return the fewest GPUs of so much memory that a model fits as it is published; None where none do."""
    weights = model.gigabytes or 2 * model.billions
    share, least = _LEAST_REST
    needed = weights + max(share * weights, least)
    sizes = (it for it in TENSOR_PARALLEL_SIZES if needed <= _SHARE * gigabytes * it)
    return next(sizes, None)


def _on(model: PublishedModel, gpu: Gpu, paths: Sequence[AnyPath]) -> str:
    count = num_gpus(model, gpu.gigabytes)
    if count is None:
        return _NONE
    if model.preset is None:
        return f"{count}: {_AT_START}"
    unproven = unproven_operators(preset_named(model.preset).whole, gpu.reviewed, paths, count)
    if Operator.ATTENTION in unproven:
        return f"{count}: {_AT_START}"
    but = f" but {' '.join(operator.value for operator in unproven)}" if unproven else ""
    return f"{count}: proven{but}"


def _times(measured: Iterable[Measured]) -> str:
    return "; ".join(f"{it.gpu} {it.first_token_ms:g} ms, {it.token_ms:g} ms" for it in measured)
