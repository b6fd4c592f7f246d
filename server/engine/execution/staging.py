"""Small tensors to the device without waiting for it."""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def staged(value: T, device: torch.device) -> T:
    """A tensor, or a dataclass with every tensor in it, from the CPU on the device.

    On CUDA by way of pinned memory: torch copies from other memory only when all launches before it are done, and
    frees pinned memory only when the copy is.
    """
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: staged(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **found)
    return value
