"""Launches of the kernels that keep what slots get, whatever the rule: no kernel for one GPU is imported."""

from typing import Any

from kernels.calls.triton_launch import Launch


def keep_launches(
    kernel: Any, num_rows: int, num_writes: int, parts: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[Launch]:
    """Return the launches that keep what each slot gets, the written ones first: a row's own overwrites their inputs.

    arguments  all but the last, the first index of a launch
    """
    launched = ((num_rows, num_writes), (0, num_rows))
    return [Launch(kernel, (count, parts), (*arguments, first), options) for first, count in launched if count]
