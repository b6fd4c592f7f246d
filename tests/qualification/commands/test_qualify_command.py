"""Flags of `hallmark qualify` that choose the shapes."""

import argparse
from pathlib import Path

import pytest

from kernels.catalog import PATHS
from kernels.experts.formats import FewBitFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertsShape
from kernels.linear.formats.int4_formats import INT4_128
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, PLAIN, LinearShape
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Phase
from qualification.commands.qualify import add_arguments, choices_of, models_of, typed
from qualification.decision.defaults import Choices
from qualification.decision.presets import Rounding
from qualification.measure.campaign import targets_of

FORMATS = {
    Rounding.FP8: FP8_ROWS,
    Rounding.FP8_STATIC: FP8_STATIC,
    Rounding.FP8_BLOCKS: FP8_BLOCKS,
    Rounding.INT4: INT4_128,
}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--preset", "llama-3.1-8b", *words])


@pytest.mark.parametrize(("size", "name", "heads"), [(1, "llama-3.1-8b", (32, 8)), (4, "llama-3.1-8b-tp4", (8, 2))])
def test_ranks_have_a_file_and_shapes_of_their_own(size: int, name: str, heads: tuple[int, int]) -> None:
    args = parse("--tensor-parallel-size", str(size))
    [target] = targets_of(
        models_of(args),
        Choices(),
        device_type="cuda",
        phases=[phase.value for phase in PLANNED_PHASES],
        paths=PATHS,
        file_of=lambda name: Path(f"{name}.json"),
        tensor_parallel_size=args.tensor_parallel_size,
    )
    assert (target.name, target.file) == (name, Path(f"{name}.json"))
    assert {(shape.num_heads, shape.num_kv_heads) for shape in target.shapes} == {heads}
    assert ("--tensor-parallel-size 4" in typed(args)) == (size == 4)


@pytest.mark.parametrize("rounding", Rounding)
def test_a_preset_is_proven_in_8_bits_beside_its_own_format(rounding: Rounding) -> None:
    args = parse("--quantization", rounding.value, "--phases", "linear")
    [target] = targets_of(
        models_of(args), choices_of(args), device_type="cuda", phases=args.phases, paths=LINEAR_PATHS, file_of=Path
    )
    formats = {it.weight_format for it in target.shapes if isinstance(it, LinearShape)}
    assert target.name == f"llama-3.1-8b-{rounding.value}"
    assert formats == {PLAIN, FORMATS[rounding]}  # the head's, and the other products'
    assert f"--quantization {rounding.value}" in typed(args)


@pytest.mark.parametrize("preset", ["qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
def test_a_hybrid_is_proven_in_blocks_as_its_published_files_have_it(preset: str) -> None:
    args = parse("--quantization", "fp8-blocks", "--phases", "linear", "experts")
    args.preset = [preset]
    [target] = targets_of(
        models_of(args), choices_of(args), device_type="cuda", phases=args.phases,
        paths=(*LINEAR_PATHS, *EXPERTS_PATHS), file_of=Path,
    )  # fmt: skip
    products = {(it.size_out, it.weight_format) for it in target.shapes if isinstance(it, LinearShape)}
    assert {(12288, FP8_BLOCKS), (64, PLAIN)} < products
    assert {it.format for it in target.shapes if isinstance(it, ExpertsShape)} == {FewBitFormat.FP8_BLOCKS}


def test_experts_are_proven_as_a_server_rounds_them() -> None:
    """Gemma's experts share a tensor; gpt-oss's have 4 bits already."""
    args = parse("--quantization", "fp8", "--phases", "experts")

    def shapes_of(name: str) -> tuple[AnyShape, ...]:
        args.preset = [name]
        [target] = targets_of(
            models_of(args), choices_of(args), device_type="cuda", phases=args.phases, paths=EXPERTS_PATHS,
            file_of=Path,
        )  # fmt: skip
        return target.shapes

    found = shapes_of("gemma-4-26b-a4b")
    assert {it.format for it in found if isinstance(it, ExpertsShape)} == {FewBitFormat.FP8_ROWS}
    with pytest.raises(ValueError, match=r"--quantization fp8 rounds weights of 16 bits .* has mxfp4 already"):
        shapes_of("gpt-oss-20b")


def test_products_of_a_draft_head_are_proven_where_drafts_are_asked_for() -> None:
    def formats_of(preset: str, *words: str) -> set[tuple[int, str]]:
        args = parse("--phases", "linear", *words)
        args.preset = [preset]
        [target] = targets_of(
            models_of(args), choices_of(args), device_type="cuda", phases=args.phases, paths=LINEAR_PATHS, file_of=Path
        )
        return {(it.size_in, it.weight_format.name) for it in target.shapes if isinstance(it, LinearShape)}

    drafting = formats_of("qwen3.5-9b", "verify") - formats_of("qwen3.5-9b")
    assert drafting == {(2 * 4096, "plain"), (4096, "fp8_rows")}  # before its layer, and its copy of the head
    assert formats_of("llama-3.1-8b", "verify") == formats_of("llama-3.1-8b")


def test_verifying_drafted_tokens_is_proven_where_it_is_asked_for() -> None:
    def phases_of(*words: str) -> set[Phase]:
        args = parse("--max-model-len", "512", *words)
        [target] = targets_of(
            models_of(args), choices_of(args), device_type="cuda", phases=args.phases, paths=PATHS, file_of=Path
        )
        return {shape.phase for shape in target.shapes if isinstance(shape, AttentionShape)}

    assert phases_of("--phases", "verify") == {Phase.VERIFY}
    assert phases_of("--phases", "decode", "verify") == {Phase.DECODE, Phase.VERIFY}
    assert phases_of() == {*PLANNED_PHASES}
    assert "--phases decode verify" in typed(parse("--phases", "decode", "verify"))


@pytest.mark.parametrize("size", ["0", "3", "16", "many"])
def test_a_size_that_is_not_offered_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--tensor-parallel-size", size)
    assert "--tensor-parallel-size" in capsys.readouterr().err


def test_a_whole_model_is_timed_on_one_gpu_only() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size must be 1"):
        models_of(parse("--full-model", "--tensor-parallel-size", "2"))
