"""The fused ops beside PyTorch's on a CUDA GPU: `python -m bench.attention.fused --out FILE`.

Times are of CUDA graphs that run an op on several distinct inputs, more bytes than the L2 holds, divided by their
number: as in a decode step, weights come from memory, and a launch may overlap with the one before it.
"""

import argparse
import gc
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.machine import commit_of_code, machine_of
from kernels.fused.activation import swiglu, swiglu_torch
from kernels.fused.norm import add_rms_norm, add_rms_norm_torch
from kernels.fused.rope_kv import rope_and_write_kv, rope_and_write_kv_torch
from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import multiply
from kernels.linear.weights import PlainWeight
from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling, SamplingTensors, draw_torch, greedy, sample, sampling_tensors
from kernels.system.device import read_fingerprint
from kernels.system.triton_cache import use_own_cache

_COLD_BYTES = 400 * 2**20  # of distinct inputs: eight times an H200's L2
_VOCAB = 128_256
_GPU = torch.device("cuda")
Item = TypeVar("Item")
_TOKENS = Random(0).choices(range(_VOCAB), k=800)  # a history: 500 tokens of a prompt, 300 of the output
_PENALTIES = RowPenalties(_TOKENS[:500], _TOKENS[500:], repetition=1.1, presence=0.2, frequency=0.3)


@dataclass(frozen=True, slots=True)
class Model:
    """The matmuls of a decode step: [N, K] of each layer in order, gate and up together third; and the head."""

    name: str
    num_layers: int
    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]


MODELS = (
    Model("llama-3.1-8b", 32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128_256, 4096)),
    Model("qwen3-0.6b", 28, ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), (151_936, 1024)),
)
SAMPLING = {
    "temperature": RowSampling(1.0),
    "top-k 50, top-p 0.9": RowSampling(0.8, top_k=50, top_p=0.9),
    "top-p 0.95": RowSampling(top_p=0.95),
    "top-k 1000": RowSampling(top_k=1000),
    "min-p 0.05": RowSampling(min_p=0.05),
    "penalties, top-k 50, top-p 0.9": RowSampling(0.8, top_k=50, top_p=0.9, penalties=_PENALTIES),
}


def replay_us(call: Callable[[Item], object], items: Sequence[Item], num_samples: int = 9) -> float:
    """Median time of `call` of one item, in a graph of calls of all of them."""

    def work() -> None:
        for item in items:
            call(item)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    samples: list[float] = []
    for _ in range(num_samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(items))
    return round(statistics.median(samples[2:]), 2)


def row(op: str, num_bytes: int, ours_us: float, torch_us: float | None, **case: object) -> dict[str, object]:
    """`num_bytes`: read and written once each."""
    ratio = None if torch_us is None else round(torch_us / ours_us, 3)
    rate = round(num_bytes / ours_us * 1e-6, 3)
    return {"op": op, **case, "ours_us": ours_us, "torch_us": torch_us, "ratio": ratio, "tb_per_second": rate}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=_GPU)


def matmul_rows(model: Model, batches: Sequence[int]) -> Iterator[dict[str, object]]:
    """Time each matmul alone, and all of a decode step in one graph; `fused` with SwiGLU inside of gate and up."""
    weights = [[randn(*shape) for shape in model.layer] for _ in range(model.num_layers)]
    head = randn(*model.head)
    for batch in batches:
        yield from _batch_rows(model, weights, head, batch)


def _batch_rows(model: Model, weights: list[list[Tensor]], head: Tensor, batch: int) -> Iterator[dict[str, object]]:
    inputs = {size: randn(batch, size) for size in {size for _, size in (*model.layer, model.head)}}

    def ours(weight: Tensor) -> Tensor:
        return multiply(inputs[weight.shape[1]], PlainWeight(weight))

    def theirs(weight: Tensor) -> Tensor:
        return F.linear(inputs[weight.shape[1]], weight)

    def fused(weight: Tensor) -> Tensor:
        epilogue = Epilogue.SWIGLU if weight.shape == model.layer[2] else Epilogue.NONE
        return multiply(inputs[weight.shape[1]], PlainWeight(weight), epilogue=epilogue)

    for index, (size_out, size_in) in enumerate(model.layer):
        each = [layer[index] for layer in weights]
        case = {"model": model.name, "batch": batch, "N": size_out, "K": size_in}
        yield row("matmul", each[0].nbytes, replay_us(ours, each), replay_us(theirs, each), **case)
    step = [weight for layer in weights for weight in layer] + [head]
    num_bytes, by_torch = sum(weight.nbytes for weight in step), replay_us(theirs, step) * len(step)
    for is_fused, call in ((False, ours), (True, fused)):
        by_us = round(replay_us(call, step) * len(step), 1)
        case = {"model": model.name, "batch": batch, "fused": is_fused}
        yield row("matmuls of a step", num_bytes, by_us, round(by_torch, 1), **case)


def sampling_rows(batches: Sequence[int]) -> Iterator[dict[str, object]]:
    """Sampling and greedy choice from logits of normal noise, sigma 3."""
    for batch in batches:
        num_bytes = batch * _VOCAB * 4
        pool = [_logits(batch) for _ in range(max(2, min(8, _COLD_BYTES // num_bytes)))]
        case = {"batch": batch, "vocab": _VOCAB}
        for name, how in SAMPLING.items():
            tensors = sampling_tensors([replace(how, seed=n, position=n) for n in range(batch)], _VOCAB, _GPU)
            by_us = replay_us(partial(_sample, tensors), pool)
            by_torch = None if how.penalties is not None else replay_us(partial(_sample_torch, tensors), pool)
            yield row("sample", num_bytes, by_us, by_torch, **case, how=name)
        yield row("greedy", num_bytes, replay_us(greedy, pool), replay_us(_greedy_torch, pool), **case)


def _logits(batch: int) -> Tensor:
    return torch.randn(batch, _VOCAB, device=_GPU) * 3


def _sample(tensors: SamplingTensors, logits: Tensor) -> object:
    return sample(logits, tensors)


def _sample_torch(tensors: SamplingTensors, logits: Tensor) -> object:
    return draw_torch(logits.clone(), tensors)


def _greedy_torch(logits: Tensor) -> object:
    return logits.max(dim=-1)


def elementwise_rows(num_tokens: int, size: int) -> Iterator[dict[str, object]]:
    """RMSNorm with the residual, and SwiGLU; more bytes in one call than the L2 holds."""
    weight, case = randn(size), {"tokens": num_tokens, "size": size}
    pairs = [(randn(num_tokens, size), randn(num_tokens, size)) for _ in range(3)]
    by_us = replay_us(lambda pair: add_rms_norm(*pair, weight, 1e-5), pairs)
    by_torch = replay_us(lambda pair: add_rms_norm_torch(*pair, weight, 1e-5), pairs)
    yield row("add_rms_norm", 2 * pairs[0][0].nbytes * 2, by_us, by_torch, **case)
    both = [randn(num_tokens, 2 * size) for _ in range(3)]
    yield row("swiglu", both[0].nbytes * 3 // 2, replay_us(swiglu, both), replay_us(swiglu_torch, both), **case)


def rope_rows(num_tokens: int) -> Iterator[dict[str, object]]:
    """Rotation and KV write of an 8B's layer: q, k and v are read, q and k written in place, k and v into pages."""
    num_heads, num_kv_heads, head_dim, page_size = 32, 8, 128, 16
    inputs = [randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) for _ in range(3)]
    pages = [randn(num_tokens // page_size, page_size, num_kv_heads, head_dim) for _ in range(2)]
    cos_sin = torch.full((num_tokens, head_dim), 0.5**0.5, device=_GPU)  # turns in place, again and again: no growth
    positions = torch.arange(num_tokens, dtype=torch.int32, device=_GPU)
    slots = torch.randperm(num_tokens, device=_GPU)

    def call(op: Callable[..., None], packed: Tensor) -> None:
        heads = torch.split(packed.view(num_tokens, -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
        op(*heads, cos_sin, positions, *pages, slots)

    num_bytes = inputs[0].nbytes + (num_heads + 3 * num_kv_heads) * head_dim * num_tokens * 2
    by_us, by_torch = (replay_us(partial(call, op), inputs) for op in (rope_and_write_kv, rope_and_write_kv_torch))
    yield row("rope_and_write_kv", num_bytes, by_us, by_torch, tokens=num_tokens, heads=num_heads, head_dim=head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--sampling-batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    args = parser.parse_args()
    use_own_cache()
    torch.manual_seed(0)
    gc.freeze()  # every capture collects garbage first, which takes as long as there are objects of imports to look at
    fingerprint = read_fingerprint(_GPU)
    head = {
        "command": shlex.join(["python", "-m", "bench.attention.fused", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of_code(),
        "machine": machine_of(fingerprint, _GPU),
    }
    groups = [elementwise_rows(8192, 4096), rope_rows(8192), sampling_rows(args.sampling_batches)]
    rows: list[dict[str, object]] = []
    for group in [*groups, *(matmul_rows(model, args.batches) for model in MODELS)]:
        for found in group:
            print(json.dumps(found), flush=True)
            rows.append(found)
        args.out.write_text(
            _as_text(head, rows)
        )  # after each group, so that an interrupted run keeps what it has measured


def _as_text(head: Mapping[str, object], rows: Sequence[dict[str, object]]) -> str:
    lines = ",\n  ".join(json.dumps(found) for found in rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'


if __name__ == "__main__":
    main()
