"""Compare results of a recurrence with states of bf16 and of fp32, by length.

PYTHONPATH=. python trials/state_dtypes.py [--most 32768] [--seeds 2] [--out docs/benchmarks/state-dtypes-cpu.json]

One sequence of each seed and kind of gates goes through `torch.recurrence.cpu` in prompts of 64 tokens, once with
states of each dtype, bf16 tokens in both. At each power of two from 1,024 on the last 64 results of each head are
compared: the root of the mean square of their differences over that of the results with states of fp32.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.machine import head_of_cpu
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Dtype, Phase

SIZES = RecurrenceSizes(1, 2, 128, 128, 4)  # a key head of Qwen3.5-35B-A3B and its value heads
LEAST = 1024  # tokens
KINDS = {"drawn as a new model's": None, "a decay of 1/512 a token": 1 / 512, "no decay": 0.0}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence's tokens, and the layer's weights."""

    qkv: Tensor
    a: Tensor
    b: Tensor
    weights: RecurrenceWeights


def drawn(decay: float | None, num_tokens: int, seed: int) -> Drawn:
    """Draw tokens of bf16. `decay`: the same of every token; None: A of 1 to 16 and dt_bias of 1, as models begin."""
    generator = torch.Generator().manual_seed(seed)
    heads = SIZES.num_value_heads
    a_log = torch.log(1 + 15 * torch.rand(heads, generator=generator))
    a = torch.randn(num_tokens, heads, generator=generator)
    if decay is not None:
        a_log = torch.zeros(heads)
        a = torch.full((num_tokens, heads), -60.0 if decay == 0 else math.log(math.expm1(decay)) - 1)
    conv = torch.randn(SIZES.conv_dim, SIZES.width, generator=generator) / 2
    qkv, b = (torch.randn(num_tokens, size, generator=generator) for size in (SIZES.conv_dim, heads))
    kind = torch.bfloat16
    return Drawn(qkv.to(kind), a.to(kind), b.to(kind), RecurrenceWeights(conv.to(kind), a_log, torch.ones(heads)))


def results(given: Drawn, state_dtype: Dtype) -> Tensor:
    """Return the results [T, heads, d] with states of a dtype."""
    tensors = SIZES.state_tensors(Dtype.BF16, state_dtype)
    state = RecurrenceState(*(torch.zeros(1, *shape, dtype=torch_dtype(dtype)) for shape, dtype in tensors))
    num_tokens = given.qkv.shape[0]
    out = torch.empty(num_tokens, SIZES.num_value_heads, SIZES.value_dim, dtype=torch.bfloat16)
    none = torch.zeros(0, dtype=torch.int64)
    for first in range(0, num_tokens, CHUNK):
        own = slice(first, first + CHUNK)
        rows = RecurrenceRows(
            *(torch.tensor([it], dtype=torch.int32) for it in (0, CHUNK, first, first)),
            *(torch.zeros(1, dtype=torch.int64) for _ in range(2)), none, none, longest=CHUNK, phase=Phase.EXTEND,
        )  # fmt: skip
        run_recurrence_eager(given.qkv[own], given.a[own], given.b[own], given.weights, rows, state, out[own])
    return out.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lengths = [LEAST << power for power in range((asked.most // LEAST).bit_length())]
    rows = []
    for name, decay in KINDS.items():
        worst = dict.fromkeys(lengths, 0.0)
        for seed in range(asked.seeds):
            given = drawn(decay, lengths[-1], seed)
            wanted, found = results(given, Dtype.FP32), results(given, Dtype.BF16)
            for length in lengths:
                own = slice(length - CHUNK, length)
                squares = (found[own] - wanted[own]).square().mean(dim=(0, 2)) / wanted[own].square().mean(dim=(0, 2))
                worst[length] = max(worst[length], float(squares.sqrt().max()))
        rows.append({"gates": name, **{str(length): float(f"{error:.3g}") for length, error in worst.items()}})
        print(rows[-1], flush=True)
    if asked.out is not None:
        head = head_of_cpu("PYTHONPATH=. python trials/state_dtypes.py")
        asked.out.write_text(json.dumps({**head, "seeds": asked.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
