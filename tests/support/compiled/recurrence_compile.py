"""Compiles the Triton kernels of the recurrence for sm_90, as a GPU launches them; prints facts of their code.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from dataclasses import replace
from functools import partial

import torch
from triton.runtime import driver

from kernels.recurrence.channel_delta import launch as of_channel_delta
from kernels.recurrence.fixed_decay import launch as of_fixed_decay
from kernels.recurrence.portable import launch as of_gated_delta
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space import launch as of_state_space
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.recurrence_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.state_slots import Part, recurrence_slots
from support.compiled.gluon_sass import count, disassemble
from support.compiled.sm90_driver import Hopper

CPU = torch.device("cpu")
QWEN35 = RecurrenceSizes(16, 32, 128, 128, 4)  # of Qwen3.5-35B-A3B
DECODE = RecurrenceShape.of(QWEN35, Phase.DECODE, Dtype.BF16, Dtype.FP32, TokenRows.LE_16)
NEMOTRON = RecurrenceSizes(8, 64, 128, 64, 4)  # of Nemotron-3-Nano-30B-A3B
SPACE = RecurrenceShape.of(NEMOTRON, Phase.DECODE, Dtype.BF16, Dtype.FP32, TokenRows.LE_16, RecurrenceForm.STATE_SPACE)
KIMI = RecurrenceSizes(32, 32, 128, 128, 4)  # of Kimi-Linear-48B-A3B
CHANNELS = RecurrenceShape.of(
    KIMI, Phase.DECODE, Dtype.BF16, Dtype.FP32, TokenRows.LE_16, RecurrenceForm.CHANNEL_DELTA
)  # fmt: skip
LING = RecurrenceSizes(64, 64, 128, 128, 1)  # of Ling-2.6-1T
FIXED = RecurrenceShape.of(LING, Phase.DECODE, Dtype.BF16, Dtype.FP32, TokenRows.LE_16, RecurrenceForm.FIXED_DECAY)
LAUNCHES = {
    RecurrenceForm.GATED_DELTA: partial(of_gated_delta.launches, is_hopper=True),
    RecurrenceForm.STATE_SPACE: of_state_space.launches,
    RecurrenceForm.FIXED_DECAY: of_fixed_decay.launches,
    RecurrenceForm.CHANNEL_DELTA: of_channel_delta.launches,
}
SHAPES = {  # and the tokens of a row, and those of them that may be drafted ones
    "decode": (DECODE, 1),
    "decode, states of bf16": (replace(DECODE, state_dtype=Dtype.BF16), 1),
    "decode behind drafts": (DECODE, 1, 3),
    "prompt": (replace(DECODE, phase=Phase.EXTEND), 40),
    "verify": (replace(DECODE, phase=Phase.VERIFY), 4, 3),
    "verify five": (replace(DECODE, phase=Phase.VERIFY), 5, 4),
    "prompt, other sizes": (replace(DECODE, phase=Phase.EXTEND, key_dim=64), 40),
    "prompt, fp32": (replace(DECODE, phase=Phase.EXTEND, dtype=Dtype.FP32), 4),
    "space, prompt": (replace(SPACE, phase=Phase.EXTEND), 70),
    "space, verify": (replace(SPACE, phase=Phase.VERIFY), 4),
    "space, fp32": (replace(SPACE, dtype=Dtype.FP32), 1),
    "fixed, prompt": (replace(FIXED, phase=Phase.EXTEND), 70),
    "fixed, verify": (replace(FIXED, phase=Phase.VERIFY), 4),
    "fixed, fp32": (replace(FIXED, dtype=Dtype.FP32), 1),
    "channels, prompt": (replace(CHANNELS, phase=Phase.EXTEND), 70),
    "channels, verify": (replace(CHANNELS, phase=Phase.VERIFY), 4),
    "channels, fp32": (replace(CHANNELS, dtype=Dtype.FP32), 1),
}


def facts(shape: RecurrenceShape, length: int, num_drafted: int = 0) -> dict[str, dict[str, int]]:
    """Facts of the kernels of a call, by their names."""
    generator = torch.Generator().manual_seed(0)
    weights = drawn_weights(shape, generator, CPU)
    slots = recurrence_slots(shape, weights, 2, num_drafted, CPU)
    tokens = drawn_tokens(shape, Content.PLAIN, length, weights, generator)
    given = slots.given([Part(tokens, 0, slots.zero, 0)])
    qkv, a, b = given.tokens
    out = qkv.new_empty(qkv.shape[0], shape.num_value_heads, shape.value_dim)
    found = {}
    for launch in LAUNCHES[shape.form](qkv, a, b, weights, given.rows, slots.state, out):
        kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        code = disassemble(kernel.asm["cubin"])
        found[launch.kernel.__name__] = {
            "spills": count(code, "STL"),
            "mma": count(code, "HMMA"),
            "wgmma": count(code, "HGMMA"),
            "global_atomics": count(code, "ATOMG") + count(code, "RED.E"),
            "shared_bytes": kernel.metadata.shared,
        }
    return found


def main() -> None:
    driver.set_active(Hopper())
    print(json.dumps({f"{name}: {kernel}": it for name, of in SHAPES.items() for kernel, it in facts(*of).items()}))


if __name__ == "__main__":
    main()
