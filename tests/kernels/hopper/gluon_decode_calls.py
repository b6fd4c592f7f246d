"""Calls `gluon.decode.hopper` without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from gluon_compile import Hopper
from triton.runtime import driver

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.decode import kernel as gluon_decode
from kernels.hopper.decode import launch as gluon_decode_launch

PROCESSORS = 132
ADDRESSES = 1 << 32  # and above: they differ from call to call


class Launcher:
    """Stands in for Triton's launcher: keeps every launch, and the arguments of each."""

    launches: list[dict[str, Any]] = []  # noqa: RUF012 -- of this program
    given: list[tuple[Any, ...]] = []  # noqa: RUF012 -- of this program

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name, self.num_arguments, self.is_dependent = (
            source.fn.__name__,
            len(source.signature),
            metadata.launch_pdl,
        )

    def launch(self, *arguments: Any) -> None:
        given = arguments[13:]
        self.given.append(given)
        numbers = [x for x in given if isinstance(x, int | float) and x < ADDRESSES]
        self.launches.append(
            {"name": self.name, "grid": arguments[:3], "taken": self.num_arguments, "given": len(given)}
            | {"is_dependent": self.is_dependent, "numbers": numbers, "cluster": arguments[9][1]}
        )


def _most_clusters(_function: int, _shared_bytes: int, cluster: int) -> int:
    """As on a slice of a GPU where 4 programs of a cluster of 8 have room: of larger ones the driver knows nothing."""
    if cluster > 8 and not Recording.is_whole:
        raise RuntimeError("Triton Error [CUDA]: cluster misconfiguration")
    return 7 if Recording.is_whole else 0


class Recording(Hopper):
    is_whole = True
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
        fill_tma_descriptor=lambda address, *_: f"map of {address}",
        cuOccupancyMaxActiveClusters=_most_clusters,
    )


def call(contexts: list[int], *, max_context: int = 4096) -> list[dict[str, Any]]:
    """The launches of one call for sequences of these contexts, one query each."""
    Launcher.launches.clear()
    num_seqs = len(contexts)
    q = torch.zeros(num_seqs, 8, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 4, 64, 2, 64, dtype=torch.bfloat16)
    batch = AttentionBatch(
        torch.arange(num_seqs + 1, dtype=torch.int32),
        1,
        max_context,
        page_table=torch.zeros(num_seqs, 64, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
    )
    gluon_decode_launch.run_decode(q, k, v, batch, AttentionFlags(0.1), torch.zeros_like(q))
    return list(Launcher.launches)


def call_of_one(kv_heads: int, *, columns: int = 16) -> dict[str, Any]:
    """What a call for one sequence launches, whose page table has so many columns; whether it gave zeros at once."""
    Launcher.launches.clear()
    q = torch.zeros(1, 2 * kv_heads, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 4, 64, kv_heads, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = torch.zeros(1, columns, dtype=torch.int32)
    batch = AttentionBatch(lengths[0], 1, 64 * columns, page_table=table, context_lens=lengths[1])
    out = torch.ones_like(q)
    gluon_decode_launch.run_decode(q, k, v, batch, AttentionFlags(0.1), out)
    return {"names": [launch["name"] for launch in Launcher.launches], "is_zero": not out.any().item()}


def on_a_slice(kv_heads: int) -> dict[str, Any]:
    """As `call_of_one`, where no cluster has room."""
    gluon_decode_launch.cluster_launcher.cache_clear()
    Recording.is_whole = False
    try:
        return call_of_one(kv_heads)
    finally:
        Recording.is_whole = True
        gluon_decode_launch.cluster_launcher.cache_clear()


def layers_of_a_step(layers: int) -> dict[str, object]:
    """Layers with pages and flags of their own, whose batch keeps its plans; every third has an output of its own."""
    Launcher.launches.clear()
    q = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    outs = (torch.zeros_like(q), torch.zeros_like(q))
    batch = AttentionBatch(
        torch.arange(3, dtype=torch.int32),
        1,
        4096,
        page_table=torch.zeros(2, 64, dtype=torch.int32),
        context_lens=torch.tensor([1, 2], dtype=torch.int32),
        plans={},
    )
    wrong = []
    for layer in range(layers):
        out = outs[layer % 3 == 0]
        k, v = torch.zeros(2, 4, 64, 2, 64, dtype=torch.bfloat16)
        for plans in (batch.plans, None):
            gluon_decode_launch.run_decode(q, k, v, replace(batch, plans=plans), AttentionFlags(0.1), out)
        *shared, split, combine = map(besides_scratch, Launcher.given[-4:])
        if shared != [split, combine]:
            wrong.append(layer)
    assert batch.plans is not None
    return {"launches": len(Launcher.launches), "wrong": wrong, "kept": len(batch.plans)}


def scratch_of_a_step(layers: int) -> dict[str, int]:
    """How many scratch tensors layers whose batch keeps plans have, and how many launches.

    Each layer has an output of its own, so that none repeats what another one launched.
    """
    Launcher.given.clear()
    q = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    outs, pages = torch.zeros(layers, 2, 8, 64).to(q), torch.zeros(2, 4, 64, 2, 64, dtype=torch.bfloat16)
    table, context_lens = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    starts = torch.arange(3, dtype=torch.int32)
    batch = AttentionBatch(starts, 1, 4096, page_table=table, context_lens=context_lens, plans={})
    for out in outs:
        gluon_decode_launch.run_decode(q, *pages, batch, AttentionFlags(0.1), out)
    scratch = {given[scratch_at(given)] for given in Launcher.given}
    return {"launches": len(Launcher.given), "scratch": len(scratch)}


def layers_of_one(layers: int) -> dict[str, object]:
    """Layers of one sequence, whose rows clusters share: each has pages and sinks of its own, or those of two before.

    `wrong`: layers whose launch differs from that of a call that keeps nothing.
    """
    Launcher.launches.clear()
    q = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    out = torch.zeros_like(q)
    lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([900], dtype=torch.int32)
    table = torch.zeros(1, 16, dtype=torch.int32)
    batch = AttentionBatch(lengths[0], 1, 1024, page_table=table, context_lens=lengths[1], plans={})
    of_layers = [(*torch.zeros(2, 4, 64, 4, 64, dtype=torch.bfloat16), torch.zeros(8)) for _ in range(2)]
    wrong = []
    for layer in range(layers):
        k, v, sinks = of_layers[layer % 2]
        for plans in (batch.plans, None):
            flags = AttentionFlags(0.1, sinks=sinks)
            gluon_decode_launch.run_decode(q, k, v, replace(batch, plans=plans), flags, out)
        shared, own = Launcher.given[-2:]
        if shared != own:
            wrong.append(layer)
    assert batch.plans is not None
    return {"launches": list(Launcher.launches), "wrong": wrong, "kept": len(batch.plans)}


def besides_scratch(given: tuple[Any, ...]) -> list[Any]:
    """A launch's arguments without the address of partial results, which is behind that of the output."""
    at = scratch_at(given)
    return [*given[:at], *given[at + 1 :]]


def scratch_at(given: tuple[Any, ...]) -> int:
    return 28 if len(given) > 28 else 1


def num_compiled() -> int:
    kernels = (gluon_decode.hallmark_gluon_decode, gluon_decode.hallmark_gluon_decode_combine)
    return sum(len(kernel.device_caches[0][0]) for kernel in kernels)


def main() -> None:
    driver.set_active(Recording())
    gluon_decode_launch.num_processors = lambda _device: PROCESSORS
    short = call([1, 2])
    compiled = [num_compiled()]
    result = {
        "short": short,
        "long": call([4000, 3000]),
        "wide": call([100] * 512),
        "by_layers": layers_of_a_step(6),
    }
    compiled.append(num_compiled())
    result["of_one"] = layers_of_one(4)
    result["scratch"] = scratch_of_a_step(5)
    result["no_columns"] = call_of_one(4, columns=0)
    result["whole"] = [call_of_one(kv_heads) for kv_heads in (4, 8)]
    result["slice"] = [on_a_slice(kv_heads) for kv_heads in (4, 8)]
    print(json.dumps(result | {"compiled": compiled}))


if __name__ == "__main__":
    main()
