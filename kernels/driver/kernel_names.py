"""Names of GPU kernels as people recognise them. Imports no torch."""

import re

_SIGNATURE = re.compile(r"[<(].*")
_MANGLED = re.compile(r"_Z(NK?)?(?=\d)")  # of C++: nested, or one name
_LENGTH = re.compile(r"\d+")  # before each part of a mangled name
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


def plain_name(name: str) -> str:
    """`_ZN2at6native18elementwise_kernelILi128E...` -> `at::native::elementwise_kernel`; others as `short_name`.

    The driver gives the names of C++ as the linker has them. Source: the Itanium C++ ABI, 5.1.
    """
    found = _MANGLED.match(name)
    if found is None:
        return short_name(name)
    parts, at = [], found.end()
    while length := _LENGTH.match(name, at):
        at = length.end() + int(length[0])
        parts.append(name[length.end() : at])
        if found[1] is None:  # not nested: one name
            break
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N"))


def is_helper(name: str) -> bool:
    """True when a kernel of this (short) name moves data around attention and is none itself."""
    if name.startswith(("Memcpy", "Memset")):
        return True
    return name.startswith(_HELPERS) and "softmax" not in name.lower()
