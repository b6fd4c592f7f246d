"""Memory of more numbers than 32 bits count, of which a few are used."""

import logging
import mmap
import sys

import torch
from torch import Tensor

FAR = 2**32  # numbers that lie before the first one that is used
_SHARE_OF_FREE = 2  # it may take one part in so many of a GPU's free memory
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python names it since 3.13

logger = logging.getLogger(__name__)


def far_memory(num_bytes: int, device: torch.device) -> Tensor | None:
    """Return so many bytes without content, uint8; None, and a line in the log, where there is no room.

    On a CPU they are addresses: what is written gets memory. On a GPU all of them are memory.
    """
    if device.type == "cpu":
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            logger.info("no input past 2**32 numbers: %.1f GB of addresses were refused (%s)", num_bytes / 1e9, error)
            return None
        return torch.frombuffer(pages, dtype=torch.uint8)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + kept
    if num_bytes * _SHARE_OF_FREE > free:
        logger.info("no input past 2**32 numbers: %.1f GB are more than half of %.1f free", num_bytes / 1e9, free / 1e9)
        return None
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
