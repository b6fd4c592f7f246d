"""A launch of a Triton kernel as a value, which runs on a GPU, in the interpreter, or is compiled without either.

TODO: have `kernels/linear/portable/launches.py` import this class when its kernels are next proven: digests of
committed evidence cover it as it is written.
"""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel's launch: its arguments, and its constexpr parameters and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)
