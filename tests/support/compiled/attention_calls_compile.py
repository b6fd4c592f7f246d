"""Compiles `triton.ordered` and `triton.latent` for sm_90, as their calls launch them; prints facts as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of the kernels, nothing can be compiled.
"""

import json
from typing import Any

import torch
from triton import JITFunction
from triton.runtime import driver

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.latent import portable
from kernels.portable import ordered
from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from kernels.vocabulary.path import RunAttention
from support.compiled.gluon_sass import count, disassemble
from support.compiled.sm90_driver import Hopper

HEADS, KV_HEADS, PAGE_SIZE, NUM_TOKENS, CONTEXT, NUM_PROCESSORS = 8, 2, 64, 128, 1024, 132
Facts = dict[str, int]


class Compiled:
    """Stands in for a kernel: compiles what is launched, and keeps the facts in `found`."""

    found: list[Facts] = []  # noqa: RUF012 -- of the program

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            made = self._kernel.warmup(*arguments, grid=grid, **options)
            spills = count(disassemble(made.asm["cubin"]), "STL")
            self.found.append({"shared": made.metadata.shared, "spills": spills})

        return launch


def facts(run: RunAttention, head_dim: int, latent: int | None, is_paged: bool, num_queries: int) -> list[Facts]:
    """Facts of the kernels that a call of one sequence launches. `latent`: numbers of the keys that are the values."""
    Compiled.found.clear()
    keys = (CONTEXT // PAGE_SIZE, PAGE_SIZE) if is_paged else (num_queries,)
    k = torch.empty(*keys, KV_HEADS if latent is None else 1, head_dim, dtype=torch.bfloat16)
    q, v = torch.empty(num_queries, HEADS, head_dim, dtype=k.dtype), k[..., :latent]
    edges, context = torch.tensor([0, num_queries], dtype=torch.int32), CONTEXT if is_paged else num_queries
    table = torch.zeros(1, CONTEXT // PAGE_SIZE, dtype=torch.int32)
    where = {"page_table": table, "context_lens": edges[1:]} if is_paged else {"cu_seqlens_k": edges}
    batch = AttentionBatch(edges, num_queries, context, **where)
    run(q, k, v, batch, AttentionFlags(head_dim**-0.5), torch.empty_like(q[..., :latent]))
    return [*Compiled.found]


def main() -> None:
    driver.set_active(Hopper())
    for module in (ordered, portable):
        known: dict[str, Any] = vars(module)
        known["shared_bytes"], known["num_processors"] = (lambda _: SHARED_BYTES_HOPPER), (lambda _: NUM_PROCESSORS)
        known |= {
            name: Compiled(it) for name, it in known.items() if isinstance(it, JITFunction) and "hallmark" in name
        }
    calls = {"prompt": (False, NUM_TOKENS), "chunk": (True, NUM_TOKENS), "token": (True, 1)}
    dims = [(ordered.run_ordered, dim, None) for dim in (64, 128, 256)] + [(portable.run_latent, 576, 512)]
    found = {
        f"{run.__name__} {name} d{head_dim}": facts(run, head_dim, latent, *call)
        for run, head_dim, latent in dims
        for name, call in calls.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
