"""Runs the recurrence's kernel for rows of few tokens program by program in numpy: Triton's interpreter knows no Gluon.

What a program computes is checked so, that it reads nothing it must not read, and that it waits for what it copies:
copies arrive when they are waited for, and shared memory is NaN until then. Layouts are not checked, nor what runs at
the same time. A product is exact before it is rounded after each 16 terms, whatever the tile.
"""

import random
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.hopper import token
from kernels.recurrence.portable.launch import launches
from support.emulator.gluon_by_numpy import Array, Language, Pointer, array, kernels_in_numpy, load, store

TERMS = 16  # of a product that one instruction multiplies


@dataclass(frozen=True)
class Kind:
    """A dtype, as kernels ask for it."""

    numpy: np.dtype[Any]

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.numpy.itemsize


class Numbers(Array):
    """Array with the methods of Gluon's tensors."""

    def __array_wrap__(self, array: Any, _context: Any = None, _return_scalar: bool = False) -> "Numbers":
        return np.asarray(array).view(Numbers)

    def to(self, dtype: Any) -> "Numbers":
        return self.astype(dtype.numpy if isinstance(dtype, Kind) else dtype)


def numbers(value: Any) -> Any:
    return np.asarray(value).view(Numbers)


@dataclass
class Places(Pointer):
    """A pointer whose dtype has a width."""

    def __add__(self, other: Any) -> "Places":
        return Places(self.memory, self.offset + other)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=Kind(self.memory.dtype))


@dataclass
class Shared:
    """Shared memory, NaN where nothing has arrived."""

    numbers: np.ndarray

    @property
    def dtype(self) -> Kind:
        return Kind(self.numbers.dtype)

    def _reinterpret(self, dtype: Any, shape: list[int], _layout: Any) -> "Shared":
        assert np.dtype(getattr(dtype, "numpy", dtype)) == self.numbers.dtype
        assert self.numbers.flags.c_contiguous
        return Shared(self.numbers.reshape([int(size) for size in shape]))

    def index(self, number: Any) -> "Shared":
        assert 0 <= int(number) < self.numbers.shape[0], "a tile outside of its memory"
        return Shared(self.numbers[int(number)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.numbers[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.numbers.transpose(order))

    def load(self, _layout: Any) -> Any:
        return numbers(self.numbers.copy())

    def store(self, value: Any) -> None:
        assert value.shape == self.numbers.shape
        self.numbers[...] = value


@dataclass
class Copies:
    """The copies of a program: those begun, by groups, and the last ones, of no group yet."""

    groups: list[list[Any]] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)

    def begin(self, to: Shared, of: Places, mask: Any) -> None:
        to.numbers[...] = np.nan
        self.begun.append((to, of, mask))

    def commit(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait(self, num_left: int) -> None:
        while len(self.groups) > num_left:
            for to, of, mask in self.groups.pop(0):
                to.numbers[...] = load(of, mask, 0)


def _product(left: Any, right: Any, sum_: Any) -> Any:
    for first in range(0, left.shape[1], TERMS):
        terms = slice(first, first + TERMS)
        exact = left[:, terms].astype(np.float64) @ right[terms].astype(np.float64)
        sum_ = (exact + sum_.astype(np.float64)).astype(np.float32)
    return numbers(sum_)


def _allocate(dtype: Any, shape: list[int], _layout: Any, value: Any = None) -> Shared:
    memory = np.full(shape, np.nan, dtype.numpy if isinstance(dtype, Kind) else dtype)
    if value is not None:
        memory[...] = value
    return Shared(memory)


def _language(copies: Copies) -> tuple[Language, dict[str, Any]]:
    """`gl`, and the functions of the kernel's module."""
    language = Language()
    language.calls |= {
        "arange": lambda start, end, layout: numbers(np.arange(start, end)),  # noqa: ARG005 -- Gluon's name
        "load": lambda pointer, mask=True, other=0: numbers(load(pointer, mask, other)),
        "store": lambda pointer, value, mask=True: store(pointer, value, mask),
        "zeros": lambda shape, dtype, layout: numbers(np.zeros(shape, getattr(dtype, "numpy", dtype))),  # noqa: ARG005
        "where": lambda c, a, b: numbers(np.where(c, a, b)),
        "fma": lambda x, y, z: numbers((x.astype(np.float64) * y + z).astype(np.float32)),
        "split": lambda x: (x[..., 0], x[..., 1]),
        "allocate_shared_memory": _allocate,
        "thread_barrier": lambda: None,
        "bfloat16": "bfloat16",
        "float64": np.float64,
        "SwizzledSharedLayout": lambda *_: None,
    }
    for one in (np.exp, np.log, np.sqrt, np.abs, np.floor):
        language.calls[one.__name__.replace("absolute", "abs")] = lambda x, one=one: numbers(one(x))
    names = kernels_in_numpy(language, (token,))
    names["mma_v2"] = _product
    names["range"] = lambda *ends: range(*(int(end) for end in ends))
    names["async_copy"] = types.SimpleNamespace(
        async_copy_global_to_shared=copies.begin, commit_group=copies.commit, wait_group=copies.wait
    )
    return language, names


def _given(value: Any) -> Any:
    """An argument as the kernel takes it: all that is behind a tensor's first number can be reached."""
    if not isinstance(value, Tensor):
        return array(value)
    size = value.untyped_storage().size() // value.element_size() - value.storage_offset()
    return Places(value.as_strided((size,), (1,)).numpy())


def run_launch(launch: Launch) -> None:
    """Run the programs of a launch in numpy, in an order of no meaning."""
    copies = Copies()
    language, names = _language(copies)
    of_layout = ("num_warps", "maxnreg", "enable_fp_fusion")
    options = {name: value for name, value in launch.options.items() if name not in of_layout}
    arguments = [_given(it) for it in launch.arguments]
    programs = [(column, row) for column in range(launch.grid[0]) for row in range(launch.grid[1])]
    random.Random(len(programs)).shuffle(programs)
    with np.errstate(all="ignore"):
        for program in programs:
            language.program = program
            names[launch.kernel.__name__](*arguments, **options)
            copies.wait(0)


def run_for_hopper(
    qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, rows: RecurrenceRows, state: RecurrenceState,
    out: Tensor,
) -> None:  # fmt: skip
    """Run a call as on sm_90: a launch of the kernel in numpy, others in Triton's interpreter."""
    for launch in launches(qkv, a, b, weights, rows, state, out, is_hopper=rows.phase.value != "extend"):
        if launch.kernel.__name__ == "hallmark_recurrence_token":
            run_launch(launch)
        else:
            launch.run()
