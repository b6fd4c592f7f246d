"""Compiles `triton.ordered` for sm_90, as its calls launch it; prints bytes of shared memory, and spills, as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of the kernels, nothing can be compiled.
"""

import json
from typing import Any

import torch
from triton.runtime import driver

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.portable import ordered
from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from support.compiled.gluon_sass import count, disassemble
from support.compiled.sm90_driver import Hopper

HEADS, KV_HEADS, PAGE_SIZE, NUM_TOKENS, CONTEXT = 8, 2, 64, 128, 1024


class Compiled:
    """Stands in for a kernel: compiles what is launched, and keeps the facts in `found`."""

    found: list[dict[str, int]] = []  # noqa: RUF012 -- of the program

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            made = self._kernel.warmup(*arguments, grid=grid, **options)
            spills = count(disassemble(made.asm["cubin"]), "STL")
            self.found.append({"shared": made.metadata.shared, "spills": spills})

        return launch


def facts(head_dim: int, dtype: torch.dtype, *, is_paged: bool, num_queries: int) -> list[dict[str, int]]:
    """Facts of the kernels that a call of one sequence launches."""
    Compiled.found.clear()
    keys = (CONTEXT // PAGE_SIZE, PAGE_SIZE, KV_HEADS, head_dim) if is_paged else (num_queries, KV_HEADS, head_dim)
    q, k = torch.empty(num_queries, HEADS, head_dim, dtype=dtype), torch.empty(keys, dtype=dtype)
    edges, context = torch.tensor([0, num_queries], dtype=torch.int32), CONTEXT if is_paged else num_queries
    table = torch.zeros(1, CONTEXT // PAGE_SIZE, dtype=torch.int32)
    where = {"page_table": table, "context_lens": edges[1:]} if is_paged else {"cu_seqlens_k": edges}
    batch = AttentionBatch(edges, num_queries, context, **where)
    ordered.run_ordered(q, k, k, batch, AttentionFlags(head_dim**-0.5), torch.empty_like(q))
    return [*Compiled.found]


def main() -> None:
    driver.set_active(Hopper())
    parts: dict[str, Any] = vars(ordered)
    parts["shared_bytes"] = lambda _: SHARED_BYTES_HOPPER
    parts |= {name: Compiled(parts[name]) for name in ("hallmark_ordered", "hallmark_ordered_combine")}
    calls = {"prompt": (False, NUM_TOKENS), "chunk": (True, NUM_TOKENS), "token": (True, 1)}
    found = {
        f"{name} d{head_dim}": facts(head_dim, torch.bfloat16, is_paged=is_paged, num_queries=num_queries)
        for head_dim in (64, 128, 256)
        for name, (is_paged, num_queries) in calls.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
