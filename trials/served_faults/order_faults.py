"""Kernels that are right and sum in another order: the answers of one engine computed again by another."""

from typing import Any

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import path_named
from kernels.linear.epilogue import Epilogue
from served_faults.plant import Plant, RunProduct
from served_faults.served import Served
from support.engine.replayed import ReplayedEngine


def _in_halves(run: RunProduct) -> RunProduct:
    """Multiply both halves of the inner dim by themselves, and add."""

    def multiply(x: Tensor, weight: Any, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        if epilogue is not Epilogue.NONE:
            run(x, weight, bias, epilogue, out)
            return
        values, half = weight.values, x.shape[1] // 2
        torch.add(x[:, half:] @ values[:, half:].t(), x[:, :half] @ values[:, :half].t(), out=out)
        if bias is not None:
            out.add_(bias)

    return multiply


def _by_math(_: object) -> Any:
    """Attend by another path of the catalog, which is right too."""
    run = path_named("sdpa.math").run
    assert run is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        run(q, k, v, batch, flags, out)

    return attend


ORDER_FAULTS = {
    "none": Plant(),
    "products summed in two halves": Plant(product=_in_halves),
    "attention by another right path": Plant(attention=_by_math),
}


def num_caught(served: Served, plant: Plant, num_answers: int) -> tuple[int, int]:
    """Serve by the model's own ordered paths, and compute the answers again by others; `served` is reproducible.

    Returns how many of the answers differ, and how many were compared.
    """
    engine = ReplayedEngine(served.runner(Plant()), is_exact=True, replaying=served.runner(plant))
    reports = []
    while len(reports) < num_answers:
        reports += [it for it in engine.burst(8) if it.result != "skipped"]
    return sum(it.cause is not None for it in reports[:num_answers]), num_answers
