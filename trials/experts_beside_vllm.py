"""Time one layer of a mixture of experts, ours beside vLLM's `fused_experts` and `torch._grouped_mm`, on one GPU.

    python trials/experts_beside_vllm.py --out experts-beside-vllm.json      # with vllm importable

Every side takes the same rows, router logits and weights of Qwen3-30B-A3B's shape in bf16, routing included, in CUDA
graphs of calls on different rows, in turns; a row of the result is the median. A side whose result differs from ours by
more than bf16's roundings ends the run.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kernels.experts.hopper.launch import run_experts_hopper
from kernels.experts.kinds import RoutingConfig
from kernels.experts.routing.route_triton import run_route
from kernels.experts.weights import ExpertWeights
from kernels.fused.activation_kind import Activation

Call = Callable[[], Tensor]
NUM_EXPERTS, NUM_ACTIVE, HIDDEN, WIDTH = 128, 8, 2048, 768
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
CALLS = {1: 24, 2: 16, 4: 12, 8: 12, 16: 8, 32: 6, 64: 4, 128: 3}  # in a graph, so that no weights stay in the L2
ROUNDS = 15
MOST_DIFFERENCE = 0.02  # of the norms; sides round to bf16 at different places


def sides(x: Tensor, logits: Tensor, weights: ExpertWeights) -> dict[str, Call]:
    """Return each side's whole layer on these rows."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    config = RoutingConfig(NUM_EXPERTS, NUM_ACTIVE, renormalizes=True)
    out = torch.empty_like(x)

    def ours() -> Tensor:
        shares, experts = run_route(logits, config)
        run_experts_hopper(x, experts, shares, weights, Activation.SILU, out)
        return out

    def theirs() -> Tensor:
        shares, experts, _ = fused_topk(x, logits, NUM_ACTIVE, True)
        return fused_experts(x, weights.gate_up, weights.down, shares, experts)

    def grouped() -> Tensor:
        chosen, experts = torch.softmax(logits, 1).topk(NUM_ACTIVE, 1)
        shares = chosen / chosen.sum(1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=x.device)
        counts.index_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(x[order // NUM_ACTIVE], weights.gate_up.transpose(1, 2), offs=ends)
        hidden = functional.silu(both[:, :WIDTH]) * both[:, WIDTH:]
        sorted_rows = torch._grouped_mm(hidden, weights.down.transpose(1, 2), offs=ends)
        rows = torch.empty_like(sorted_rows)
        rows[order] = sorted_rows
        return (rows.view(-1, NUM_ACTIVE, HIDDEN) * shares[..., None].to(x.dtype)).sum(1)

    return {"hallmark": ours, "vllm": theirs, "torch._grouped_mm": grouped}


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], num_calls: int) -> dict[str, float]:
    """Return the median time of a call of each side, microseconds."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / num_calls)
    return {name: statistics.median(times) for name, times in found.items()}


def measured(num_tokens: int, weights: ExpertWeights) -> dict[str, object]:
    random = torch.Generator("cuda").manual_seed(num_tokens)
    num_calls = CALLS.get(num_tokens, 1)
    calls: dict[str, list[Call]] = {}
    for _ in range(num_calls):
        x = torch.randn(num_tokens, HIDDEN, generator=random, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, NUM_EXPERTS, generator=random, device="cuda")
        for name, call in sides(x, logits, weights).items():
            calls.setdefault(name, []).append(call)
    results = {name: of_side[0]().float() for name, of_side in calls.items()}
    ours = results["hallmark"]
    for name, result in results.items():
        difference = float((result - ours).norm() / ours.norm())
        if not difference < MOST_DIFFERENCE:
            raise SystemExit(f"{name} at {num_tokens} tokens differs from ours by {difference:.3g} of the norm")
    microseconds = in_turns({name: captured(of_side) for name, of_side in calls.items()}, num_calls)
    return {
        "tokens": num_tokens,
        "us": {name: round(us, 1) for name, us in microseconds.items()},
        "ours_over_vllm": round(microseconds["hallmark"] / microseconds["vllm"], 3),
        "tflops": round(6 * num_tokens * NUM_ACTIVE * HIDDEN * WIDTH / microseconds["hallmark"] / 1e6, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import vllm  # after the flags: --help works without it

    random = torch.Generator("cuda").manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, device="cuda", dtype=torch.bfloat16) * 0.03

    weights = ExpertWeights(normal(NUM_EXPERTS, 2 * WIDTH, HIDDEN), normal(NUM_EXPERTS, HIDDEN, WIDTH))
    rows = []
    for num_tokens in TOKENS:
        rows.append(measured(num_tokens, weights))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    about = {
        "command": "python trials/experts_beside_vllm.py",
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "vllm": vllm.__version__},
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
