"""Compiles the Triton kernels of the convolution for sm_90, as a GPU launches them; prints facts of their code.

A program of its own: where Triton's interpreter is on, as in the tests of the kernels, nothing can be compiled.
"""

import json

import torch
from triton.runtime import driver

from kernels.convolution.launch import launches
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.convolution_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.state_slots import Part, convolution_slots
from support.compiled.gluon_sass import count, disassemble
from support.compiled.sm90_driver import Hopper

CPU = torch.device("cpu")


def facts(phase: Phase, dtype: Dtype, length: int) -> dict[str, dict[str, int]]:
    """Facts of the kernels of a call, by their names."""
    shape = ConvolutionShape.of(ConvolutionSizes(2048, 3), phase, dtype, TokenRows.LE_128)  # of LFM2.5-1.2B
    generator = torch.Generator().manual_seed(0)
    weights = drawn_weights(shape, generator, CPU)
    slots = convolution_slots(shape, weights, 2, 0, CPU)
    tokens = drawn_tokens(shape, Content.PLAIN, length, weights, generator)
    given = slots.given([Part(tokens, 0, slots.zero, 0)])
    [projected], out = given.tokens, tokens[0].new_empty(length + 1, shape.channels)
    found = {}
    for launch in launches(projected, weights, given.rows, slots.state, out):
        kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        code = disassemble(kernel.asm["cubin"])
        found[launch.kernel.__name__] = {
            "spills": count(code, "STL"),
            "fused": count(code, "FFMA"),
            "global_atomics": count(code, "ATOMG") + count(code, "RED.E"),
        }
    return found


def main() -> None:
    driver.set_active(Hopper())
    calls = [(Phase.DECODE, Dtype.BF16, 1), (Phase.EXTEND, Dtype.BF16, 40), (Phase.EXTEND, Dtype.FP32, 40)]
    found = {
        f"{phase.value} {dtype.value}: {kernel}": it
        for phase, dtype, length in calls
        for kernel, it in facts(phase, dtype, length).items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
