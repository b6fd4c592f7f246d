"""Calls the attention paths for Hopper without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from kernels import functional
from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.functional import attention_varlen, plan_varlen
from kernels.hopper.decode import launch as gluon_decode_launch
from kernels.hopper.decode.kernel import hallmark_gluon_decode, hallmark_gluon_decode_combine
from kernels.hopper.extend.kernel import hallmark_gluon_extend
from kernels.hopper.extend.launch import run_extend
from kernels.hopper.extend.plan import (
    hallmark_gluon_extend_combine,
    hallmark_gluon_extend_plan,
    hallmark_gluon_extend_split,
)
from kernels.hopper.ordered.launch import run_ordered
from kernels.hopper.prefill.kernel import hallmark_gluon_prefill
from kernels.hopper.prefill.launch import run_prefill
from kernels.hopper.schedule import hallmark_gluon_plan
from kernels.tma.pointers import AnyTensor
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import RunAttention
from support.compiled.sm90_driver import Launch, Launcher, Recording

BF16, INT = torch.bfloat16, torch.int32
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0", "3.6.0")
PREFILL = (hallmark_gluon_plan, hallmark_gluon_prefill)
EXTEND = (
    hallmark_gluon_extend_plan, hallmark_gluon_extend_split, hallmark_gluon_extend, hallmark_gluon_extend_combine
)  # fmt: skip
DECODE = (hallmark_gluon_decode, hallmark_gluon_decode_combine)
# Arguments that are memory of a call's own: plans and partial results.
OWN = {
    "hallmark_gluon_prefill": (28,),
    "hallmark_gluon_extend": (28, 29, 34),
    "hallmark_gluon_extend_combine": (0, 1, 2),
    "hallmark_gluon_ordered": (28, 29, 31, 32, 33, 38),
    "hallmark_gluon_decode": (28,),
    "hallmark_gluon_decode_combine": (1,),
    "hallmark_gluon_decode_cluster": (),
}
ADDRESSES = 1 << 32  # and above: they differ from call to call
Layer = tuple[Tensor, Tensor, AttentionFlags, Tensor]  # keys, values, flags and output


def num_compiled(kernels: Iterable[Any]) -> int:
    return sum(len(kernel.device_caches[0][0]) for kernel in kernels)


def taken_launches() -> list[Launch]:
    found = list(Launcher.launches)
    Launcher.launches.clear()
    return found


def num_launches(call: Callable[[], object]) -> int:
    Launcher.launches.clear()
    call()
    return len(taken_launches())


def own(launch: Launch) -> list[Any]:
    return [launch.given[at] for at in OWN[launch.name]]


def besides_own(launch: Launch) -> tuple[str, list[Any]]:
    return launch.name, [value for at, value in enumerate(launch.given) if at not in OWN[launch.name]]


def layers_of_a_step(
    run: RunAttention, q: Tensor, batch: AttentionBatch, layers: list[Layer], num: int
) -> dict[str, object]:
    """Run layers whose batch keeps its plans; `wrong`: whose last launches differ from a call that keeps nothing."""
    batch, wrong, kept = replace(batch, plans={}), [], []
    Launcher.launches.clear()
    for at, (k, v, flags, out) in enumerate(layers):
        run(q, k, v, batch, flags, out)
        kept += taken_launches()
        run(q, k, v, replace(batch, plans=None), flags, out)
        if [besides_own(it) for it in kept[-num:]] != [besides_own(it) for it in taken_launches()[-num:]]:
            wrong.append(at)
    assert batch.plans is not None
    scratch = len({tuple(own(it)) for it in kept if it.name in OWN and own(it)})
    return {"launches": len(kept), "wrong": wrong, "kept": len(batch.plans), "scratch": scratch}


def alternating(like: Tensor, layers: int, make: Callable[[int], tuple[Tensor, Tensor, AttentionFlags]]) -> list[Layer]:
    """Every third layer has an output of its own."""
    outs = (torch.zeros_like(like), torch.zeros_like(like))
    return [(*make(layer), outs[layer % 3 == 0]) for layer in range(layers)]


def counts(launches: list[Launch]) -> list[list[int]]:
    return [[launch.taken, len(launch.given)] for launch in launches]


def prompts(tokens: int) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    q, k, v = (torch.zeros(tokens, heads, 128, dtype=BF16) for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, tokens], dtype=INT)
    return q, k, v, AttentionBatch(cu_seqlens, tokens, tokens, cu_seqlens_k=cu_seqlens)


def prefill() -> dict[str, object]:
    q, k, v, batch = prompts(256)
    out, starts = torch.zeros_like(q), batch.cu_seqlens_q
    run_prefill(q, k, v, batch, AttentionFlags(0.1), out)
    launches, compiled = taken_launches(), [num_compiled(PREFILL)]
    plan, attention = (launch.given for launch in launches)
    tensors = (AnyTensor(INT, plan[0] % 16), starts, starts)
    hallmark_gluon_plan.warmup(*tensors, *plan[3:], grid=(1,))  # through the binder: must be what was compiled
    compiled.append(num_compiled(PREFILL))
    other_q, *rest = prompts(300)
    run_prefill(other_q, *rest, AttentionFlags(0.1), torch.zeros_like(other_q))  # type: ignore[arg-type]
    compiled.append(num_compiled(PREFILL))
    of_layers = prompts(200)

    def layer(at: int) -> tuple[Tensor, Tensor, AttentionFlags]:
        flags = AttentionFlags(0.1, window=100 if at % 2 else None, sinks=torch.zeros(8))
        return of_layers[1], of_layers[2], flags

    layers = alternating(of_layers[0], 12, layer)
    plan_of_calls = plan_varlen(starts, starts, 256, 256, softmax_scale=0.1)
    of_plan = [num_launches(lambda: plan_of_calls.run(q, k.roll(n, 0), v)) for n in range(3)]  # noqa: B023 -- at once
    return {
        "compiled": compiled,
        "of_plan": of_plan,
        "alone": num_launches(lambda: attention_varlen(q, k, v, starts, starts, 256, 256, softmax_scale=0.1)),
        "by_layers": layers_of_a_step(run_prefill, of_layers[0], of_layers[3], layers, 1),
        "arguments": counts(launches),
        "plan_tensors": plan[:3] == (attention[28], starts.data_ptr(), starts.data_ptr()),
        "maps": [attention[0] == q.data_ptr(), attention[7] == k.data_ptr(), attention[14] == v.data_ptr()],
        "out": attention[25] == out.data_ptr(),
        "strides": attention[26:28],
        "heads": attention[31:34],
    }


def pages(tokens: int, context: int, num_seqs: int = 1) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Two KV heads of four query heads over pages that are every other one of their pool."""
    q = torch.zeros(num_seqs * tokens, 8, 64, dtype=BF16)
    k, v = torch.zeros(200, 2, 64, 2, 64, dtype=BF16).unbind(1)
    table, lengths = torch.zeros(num_seqs, 200, dtype=INT), torch.full((num_seqs,), context, dtype=INT)
    starts = torch.arange(num_seqs + 1, dtype=INT) * tokens
    return q, k, v, AttentionBatch(starts, tokens, context, page_table=table, context_lens=lengths)


def called(run: RunAttention, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> list[Launch]:
    run(q, k, v, batch, AttentionFlags(0.1), torch.zeros_like(q))
    return taken_launches()


def extend() -> dict[str, object]:
    q, k, v, batch = pages(16, 9000)
    launches = called(run_extend, q, k, v, batch)
    of_six = called(run_extend, *pages(16, 9000, num_seqs=6))  # planned by one launch, split by another
    compiled = [num_compiled(EXTEND)]
    of_lengths, of_parts = [INT] * 4, [INT, torch.float32, torch.float32, BF16, torch.float32]
    for kernel, num_warps, dtypes, launch in (
        (hallmark_gluon_extend_split, 8, of_lengths, launches[0]),
        (hallmark_gluon_extend_combine, 4, of_parts, launches[2]),
        (hallmark_gluon_extend_plan, 4, of_lengths, of_six[0]),
        (hallmark_gluon_extend_split, 8, of_lengths, of_six[1]),
    ):  # through the binder: must be what was compiled
        tensors = [x and AnyTensor(dtype, x % 16) for x, dtype in zip(launch.given, dtypes, strict=False)]
        kernel.warmup(*tensors, *launch.given[len(dtypes) :], grid=(1,), launch_pdl=True, num_warps=num_warps)
    compiled.append(num_compiled(EXTEND))
    called(run_extend, *pages(21, 11000))
    called(run_extend, *pages(2000, 100_000))  # on three consumers
    compiled.append(num_compiled(EXTEND))
    of_layers, _, _, step = pages(16, 9000)

    def layer(_at: int) -> tuple[Tensor, Tensor, AttentionFlags]:
        k, v = torch.zeros(2, 200, 64, 2, 64, dtype=BF16)
        return k, v, AttentionFlags(0.1, sinks=torch.zeros(8))

    attention = launches[1].given
    assert batch.page_table is not None
    return {
        "compiled": compiled,
        "by_layers": layers_of_a_step(run_extend, of_layers, step, alternating(of_layers, 6, layer), 2),
        "arguments": counts(launches + of_six),
        "launches": [len(launches), len(of_six), len(called(run_extend, *pages(16, 200)))],
        "maps": [attention[0] == q.data_ptr(), attention[7] == k.data_ptr(), attention[14] == v.data_ptr()],
        "table": attention[30] == batch.page_table.data_ptr(),
        "rows_of_a_page": attention[32:34],
        "heads": attention[37:40],
    }


def tokens(
    contexts: list[int], *, kv_heads: int = 2, columns: int = 64
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Eight query heads, one query a sequence."""
    num_seqs = len(contexts)
    q = torch.zeros(num_seqs, 8, 64, dtype=BF16)
    k, v = torch.zeros(2, 4, 64, kv_heads, 64, dtype=BF16)
    table, lengths = torch.zeros(num_seqs, columns, dtype=INT), torch.tensor(contexts, dtype=INT)
    starts = torch.arange(num_seqs + 1, dtype=INT)
    return q, k, v, AttentionBatch(starts, 1, 64 * columns, page_table=table, context_lens=lengths)


def one_token(kv_heads: int, *, columns: int = 16) -> dict[str, Any]:
    """Return the launches of a call for one sequence, and whether it gave zeros at once."""
    _, k, v, batch = tokens([0], kv_heads=kv_heads, columns=columns)
    q = torch.zeros(1, 2 * kv_heads, 64, dtype=BF16)
    out = torch.ones_like(q)
    gluon_decode_launch.run_decode(q, k, v, batch, AttentionFlags(0.1), out)
    return {"names": [launch.name for launch in taken_launches()], "is_zero": not out.any().item()}


def on_a_slice(kv_heads: int) -> dict[str, Any]:
    """Return the same as `one_token`, where no cluster has room."""
    gluon_decode_launch.cluster_launcher.cache_clear()
    Recording.most_clusters, whole = 0, Recording.most_clusters
    try:
        return one_token(kv_heads)
    finally:
        Recording.most_clusters = whole
        gluon_decode_launch.cluster_launcher.cache_clear()


def shown(launches: list[Launch]) -> list[dict[str, Any]]:
    """Launches without the addresses among their arguments."""
    found = []
    for launch in launches:
        numbers = [x for x in launch.given if isinstance(x, int | float) and x < ADDRESSES]
        found.append({**asdict(launch), "given": len(launch.given), "numbers": numbers})
    return found


def decode() -> dict[str, object]:
    gluon_decode_launch.num_processors = lambda _device: 132
    run = gluon_decode_launch.run_decode
    result: dict[str, object] = {"short": shown(called(run, *tokens([1, 2])))}
    compiled = [num_compiled(DECODE)]
    result["long"] = shown(called(run, *tokens([4000, 3000])))
    result["wide"] = shown(called(run, *tokens([100] * 512)))
    q, k, v, batch = tokens([1, 2])

    def layer(_at: int) -> tuple[Tensor, Tensor, AttentionFlags]:
        return torch.zeros_like(k), torch.zeros_like(v), AttentionFlags(0.1)

    result["by_layers"] = layers_of_a_step(run, q, batch, alternating(q, 6, layer), 2)
    apart: list[Layer] = [(k, v, AttentionFlags(0.1), torch.zeros_like(q)) for _ in range(5)]  # none repeats another's
    result["apart"] = layers_of_a_step(run, q, batch, apart, 2)
    compiled.append(num_compiled(DECODE))
    q, k, v, batch = tokens([900], kv_heads=4, columns=16)
    out, two = torch.zeros_like(q), [(torch.zeros_like(k), torch.zeros_like(v), torch.zeros(8)) for _ in range(2)]
    layers = [(*pages, AttentionFlags(0.1, sinks=sinks), out) for *pages, sinks in two * 2]
    result["of_one"] = layers_of_a_step(run, q, batch, layers, 1)  # type: ignore[arg-type]
    result["one"] = shown(called(run, q, k, v, batch))
    result["no_columns"] = one_token(4, columns=0)
    result["whole"] = [one_token(kv_heads) for kv_heads in (4, 8)]
    result["slice"] = [on_a_slice(kv_heads) for kv_heads in (4, 8)]
    return result | {"compiled": compiled}


def ordered() -> dict[str, object]:
    """Chunks that are split, tokens that are, tokens that are not, and prompts."""
    many = [called(run_ordered, *pages(17, 9000)), called(run_ordered, *pages(1, 9000, num_seqs=3))]
    few = [called(run_ordered, *pages(1, 500)), called(run_ordered, *prompts(300))]
    of_layers, _, _, step = pages(1, 9000)
    of_prompts = prompts(300)

    def layer(_at: int) -> tuple[Tensor, Tensor, AttentionFlags]:
        k, v = torch.zeros(2, 200, 64, 2, 64, dtype=BF16)
        return k, v, AttentionFlags(0.1, sinks=torch.zeros(8))

    def layer_of_prompts(_at: int) -> tuple[Tensor, Tensor, AttentionFlags]:
        return of_prompts[1], of_prompts[2], AttentionFlags(0.1, sinks=torch.zeros(8))

    return {
        "names": [[launch.name for launch in launches] for launches in many + few],
        "arguments": counts([launch for launches in many + few for launch in launches]),
        "by_layers": layers_of_a_step(run_ordered, of_layers, step, alternating(of_layers, 6, layer), 1),
        "of_prompts": layers_of_a_step(
            run_ordered, of_prompts[0], of_prompts[3], alternating(of_prompts[0], 6, layer_of_prompts), 1
        ),
    }


def main() -> None:
    functional.read_fingerprint = lambda _: H200
    driver.set_active(Recording())
    print(json.dumps({"prefill": prefill, "extend": extend, "decode": decode, "ordered": ordered}[sys.argv[1]]()))


if __name__ == "__main__":
    main()
