"""Names of GPU kernels as people recognise them. Imports no torch."""

import re

_SIGNATURE = re.compile(r"[<(].*")
_TILES = re.compile(r"_(?:knob|\d+x\d+|tilesize).*")
# Of PyTorch's own kernels only a softmax is attention: the others gather, cast, mask and copy around it.
_HELPERS = (
    "at::native",
    "at_cuda_detail",
    "cub::",
    "at::cuda",
    "_ZN2at6native",
    "_ZN3cub",
    "_ZN2at4cuda",
    "elementwise_kernel_with_index",  # of arange: its namespace has no name (torch 2.11)
)


def short_name(name: str) -> str:
    """`void at::native::elementwise_kernel<128, 4, ...>(int, ...)` -> `at::native::elementwise_kernel`."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return _TILES.sub("", _SIGNATURE.sub("", name)).strip()


def is_helper(name: str) -> bool:
    """True when a kernel of this (short) name moves data around attention and is none itself."""
    if name.startswith(("Memcpy", "Memset")):
        return True
    return name.startswith(_HELPERS) and "softmax" not in name.lower()
