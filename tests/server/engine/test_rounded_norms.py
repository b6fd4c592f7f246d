"""Norms that round for the product behind them, in an engine: as many as there are, and plain ones where they fail."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8Weight
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.rounded_input import Input, RoundedInput
from qualification.decision.decision import Policy
from qualification.measure.faults.norm_faults import NormFault, WrongNorm
from server.engine.operators.linear import ProductCall
from server.protocol.messages import StepOutput
from support.engine.one_operator import proving, serve, serve_by, small_engine

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
READ_NORMS = ("in128 out512", "in128 out256 swiglu")
NO_ROOM = "CUDA error: too many resources requested for launch"


@dataclass(frozen=True, slots=True)
class Noted(WrongNorm):
    """A right path that notes what it is given, and may fail to launch its norm, or its product of what that made."""

    fault: NormFault = NormFault.NONE
    norm_fails: bool = False
    product_fails: bool = False
    noted: Counter[str] = field(default_factory=Counter, hash=False)

    def __call__(self, x: Input, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, /) -> None:
        is_rounded = isinstance(x, RoundedInput)
        self.noted["rounded" if is_rounded else "plain"] += 1
        if is_rounded and self.product_fails:
            raise RuntimeError(NO_ROOM)
        WrongNorm.__call__(self, x, weight, bias, epilogue, out)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Fp8Weight, /
    ) -> tuple[Tensor, Tensor]:
        self.noted["norm"] += 1
        if self.norm_fails:
            raise RuntimeError(NO_ROOM)
        return WrongNorm.round_norm(self, x, residual, norm, eps, weight)


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for delta in output.deltas for token in delta.token_ids]


def served_by(run: Noted, folder: Path) -> tuple[list[StepOutput], list[ProductCall]]:
    """Serve a prompt by paths as they are, then by this one: the same tokens. Return its steps, and their products."""
    built = small_engine(folder, CONFIG, proving, policy=Policy.QUALIFY, max_num_batched_tokens=16)
    expected = tokens_of(serve(built, 11))
    [path] = (it for it in LINEAR_PATHS if it.name == "torch.linear.fp8")
    dispatcher = serve_by(built, replace(path, name="gluon.linear.rounds", run=run))
    assert dispatcher.linear is not None
    calls: list[ProductCall] = []
    dispatcher.linear.tap = lambda _, call: calls.append(call)
    outputs = serve(built, 11)
    assert tokens_of(outputs) == expected
    return outputs, calls


def test_norms_round_for_the_products_behind_them(tmp_path: Path) -> None:
    run = Noted()
    outputs, calls = served_by(run, tmp_path)
    # Of 2 layers in 3 steps both norms; what is behind attention and SwiGLU is plain, and so is the head.
    assert run.noted == {"norm": 12, "rounded": 12, "plain": 15}
    assert sum(isinstance(it.read, RoundedInput) for it in calls) == 12
    assert not any(output.record.quarantined for output in outputs)


@pytest.mark.parametrize("run", [Noted(norm_fails=True), Noted(product_fails=True)], ids=["norm", "product"])
def test_a_launch_that_fails_leaves_plain_inputs(run: Noted, tmp_path: Path) -> None:
    outputs, calls = served_by(run, tmp_path)
    shapes = {f"linear fp32 fp8_blocks {it} r-{rows}" for it in READ_NORMS for rows in ("le_8", "le_1")}
    assert {shape for output in outputs for _, shape in output.record.quarantined} == shapes
    assert run.noted["rounded"] == (4 if run.product_fails else 0)
    # The path that serves then is given plain inputs of what was rounded for the one that failed.
    assert sum(isinstance(it.read, RoundedInput) for it in calls) == run.noted["rounded"]
