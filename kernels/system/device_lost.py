"""The loss of a device: of what runs there nothing more can, in this process."""

from collections.abc import Sequence

import torch


class DeviceLost(RuntimeError):
    """Something broke the device's context: nothing more can run in this process."""

    def __init__(self, message: str, suspects: Sequence[tuple[str, str]] = ()) -> None:
        """`suspects`: (path, str(shape)) pairs, one of which is to blame, as far as that is known."""
        super().__init__(message)
        self.suspects = list(suspects)


def loss_of(device: torch.device) -> RuntimeError | None:
    """Give memory back after a failure, and return the error of a device that works no more."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as loss:
        return loss
    return None
