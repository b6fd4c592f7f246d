"""The plain forward pass beside transformers, for every family, on tiny random checkpoints (fp32, CPU)."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qualification.model.config import ModelConfig
from qualification.model.families.registry import FAMILIES
from qualification.model.forward.model import ForwardReference, forward
from qualification.model.forward.sentences import SENTENCES
from server.model.load.load import load_config
from support.models.tiny_families import (
    CPU,
    IMAGE_CASES,
    MXFP4,
    TOLERANCE,
    VARIANTS,
    longrope,
    prompt,
    reference_logits,
    save_image_model,
    save_joined,
    save_mxfp4,
    save_reference,
    tolerance,
)

FAR = 3 * TOLERANCE  # both models of a comparison there are of fp32; here the other one alone is
FORWARD = Path(__file__).parents[3] / "qualification" / "model" / "forward"


def logits_of(folder: Path, model: ModelConfig, num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    reference = ForwardReference(folder, model, dtype, CPU)
    try:
        return forward(reference, prompt(num_tokens))
    finally:
        reference.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = save_reference(tmp_path, *VARIANTS[variant])
    found = logits_of(tmp_path, load_config(tmp_path), 40)
    assert (found - reference_logits(model, prompt(40))).abs().max() <= 3 * tolerance(VARIANTS[variant][0])


def test_reference_unpacks_mxfp4_as_transformers_does(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, MXFP4)
    found = logits_of(tmp_path, load_config(tmp_path), 40)
    assert (found - reference_logits(model, prompt(40))).abs().max() <= FAR


@pytest.mark.parametrize("served", [32, 128])
def test_reference_rotates_by_longrope_of_the_context(served: int, tmp_path: Path) -> None:
    original = {"original_max_position_embeddings": 32}
    changes = {"rope_parameters": {**longrope(3), "partial_rotary_factor": 0.75, **original}, **original}
    model = save_reference(tmp_path, "phi3", changes)
    num_tokens = 30 if served == 32 else 60
    found = logits_of(tmp_path, replace(load_config(tmp_path), max_position=served), num_tokens)
    assert (found - reference_logits(model, prompt(num_tokens))).abs().max() <= FAR


@pytest.mark.parametrize(("kind", "as_published"), IMAGE_CASES)
def test_reference_reads_the_text_part_of_image_models(kind: str, as_published: bool, tmp_path: Path) -> None:
    model = save_image_model(tmp_path, kind, as_published=as_published)
    found = logits_of(tmp_path, load_config(tmp_path), 40)
    assert (found - reference_logits(model, prompt(40))).abs().max() <= FAR


@pytest.mark.parametrize("width", [20, 16, 32])  # of the hidden size 32: the shape of one tensor may tell nothing
@pytest.mark.parametrize("as_published", [True, False])
def test_reference_reads_joined_experts_in_both_layouts(width: int, as_published: bool, tmp_path: Path) -> None:
    model = save_joined(tmp_path, as_published=as_published, moe_intermediate_size=width)
    found = logits_of(tmp_path, load_config(tmp_path), 20)
    assert (found - reference_logits(model, prompt(20))).abs().max() <= FAR


def test_every_served_family_has_its_sentence() -> None:
    assert {family.model_type for family in FAMILIES} == set(SENTENCES)


def test_reference_imports_no_kernel_and_no_server() -> None:
    modules = set()
    for file in FORWARD.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module))
    ours = {name for name in modules if name.split(".")[0] in ("kernels", "qualification", "server")}
    data = tuple(
        f"qualification.model.{name}"
        for name in ("config", "gated_delta", "latent", "packing", "short_convolution", "tower")
    )
    assert all(name.startswith((*data, "qualification.model.forward")) for name in ours)
