"""Runs the Gluon products of mxfp4 weights in numpy, each role a thread: Triton's interpreter does not know Gluon.

What a product computes is checked so, its instructions for codes included, and that the ring hands on each stage once:
a role that waits for what never comes ends with an error. Layouts are not checked. Shared memory starts as NaN.
"""

import threading
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.experts.hopper import many
from kernels.experts.mxfp4 import products
from kernels.experts.mxfp4.tilings import CodesTiling
from support.emulator.gluon_by_numpy import Array, Map, Pointer, array, load, store

_PATIENCE_S = 20.0
_BF16 = "bf16"  # stands for the dtype; its numbers are held as float64, or as their bits


class Tensor(Array):
    """Array with the methods of Gluon's tensors; bits stay bits."""

    def __array_wrap__(self, array: Any, _context: Any = None, _return_scalar: bool = False) -> "Tensor":
        return np.asarray(array).view(Tensor)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self if bitcast or dtype is _BF16 else self.astype(dtype).view(Tensor)

    def expand_dims(self, axis: int) -> Any:
        return np.expand_dims(self, axis).view(Tensor)

    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        assert dim == 0
        return self[start : start + length]


def tensor(value: Any) -> Any:
    return np.asarray(value).view(Tensor)


@dataclass
class Barrier:
    """An mbarrier of one arrival: its phase ends with that and with all bytes expected."""

    phase: int = 0
    arrived: bool = False
    bytes_left: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, num_bytes: int, *, arrives: bool) -> None:
        with self.changed:
            assert not (arrives and self.arrived), "a second arrival in one phase"
            self.arrived = self.arrived or arrives
            self.bytes_left += num_bytes
            if self.arrived and self.bytes_left == 0:
                self.phase += 1
                self.arrived = False
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != phase, _PATIENCE_S), "a wait that never ends"


@dataclass
class Hardware:
    """A hardware barrier: opens when so many threads have come, of which some do not wait."""

    count: int = 0
    turn: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def come(self, threads: int, of: int, *, waits: bool) -> None:
        with self.changed:
            self.count += threads
            assert self.count <= of, "more threads at a barrier than it has"
            turn = self.turn
            if self.count == of:
                self.count = 0
                self.turn += 1
                self.changed.notify_all()
            elif waits:
                assert self.changed.wait_for(lambda: self.turn != turn, _PATIENCE_S), "a sync that never ends"


class Barriers(list[Barrier]):
    def index(self, number: Any) -> Barrier:  # type: ignore[override]
        return self[int(number)]


def assemble(text: str, codes: np.ndarray, factors: np.ndarray) -> list[np.ndarray]:
    """The bits of pairs 0 to 3 that `unpack` makes of the words [..., 2] of units, both of which get the same.

    codes and factors uint32 [..., 2]: of each word.
    """
    registers: dict[str, np.ndarray] = {f"${16 + i}": codes[..., i % 2].astype(np.uint32) for i in range(4)}
    registers |= {f"${20 + i}": factors[..., i % 2].astype(np.uint32) for i in range(4)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    lines = [line.rstrip(";") for line in text.strip("{}\n").splitlines() if not line.startswith(".reg")]
    for line in lines:
        name, _, rest = line.partition(" ")
        to, *operands = (operand.strip() for operand in rest.split(","))
        if name == "selp.b32":
            registers[to] = np.where(value(operands[2]), value(operands[0]), value(operands[1]))
        elif name == "mov.b32":
            registers[to] = np.full_like(registers["$16"], value(operands[0]))
        elif name == "lop3.b32":
            a, b, c = (value(operand) for operand in operands[:3])
            assert operands[3] == "0xE4"
            registers[to] = (a & c) | (b & ~c)
        elif name == "mul.bf16x2":
            one, other = (value(operand) for operand in operands)
            halves = [bits_of(numbers_of(one >> s) * numbers_of(other >> s)) << np.uint32(s) for s in (0, 16)]
            registers[to] = halves[0] | halves[1]
        else:
            registers[to] = _OPERATIONS[name](*(value(operand) for operand in operands))
    for i in range(16):  # the second unit is treated as the first
        assert i % 4 < 2 or np.array_equal(registers[f"${i}"], registers[f"${i - 2}"])
    return [np.stack([registers[f"${4 * i + word}"] for word in (0, 1)], axis=-1) for i in range(4)]


def _rotated_right(low: np.ndarray, high: np.ndarray, by: np.uint32) -> np.ndarray:
    assert low is high
    return (low >> by) | (high << (np.uint32(32) - by))


_OPERATIONS = {
    "and.b32": np.bitwise_and, "sub.u32": np.subtract, "setp.eq.u32": np.equal, "shf.r.wrap.b32": _rotated_right,
    "shf.l.wrap.b32": lambda low, high, by: _rotated_right(low, high, np.uint32(32) - by),
}  # fmt: skip


def numbers_of(bits: np.ndarray) -> np.ndarray:
    """The low 16 bits as bf16 numbers, in float64."""
    return ((bits & np.uint32(0xFFFF)) << np.uint32(16)).astype(np.uint32).view(np.float32).astype(np.float64)


def bits_of(numbers: np.ndarray) -> np.ndarray:
    """Rounded to bf16, as 16 bits in a uint32."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
    return rounded.view(torch.int16).numpy().astype(np.int32).astype(np.uint32) & np.uint32(0xFFFF)


def _inline(text: str, _constraints: str, arguments: list[Any], dtype: Any, *, is_pure: bool, pack: int) -> Any:
    assert is_pure
    assert pack == 8
    with np.errstate(invalid="ignore"):  # the codes behind a tile's last stage, which are not used, may be NaN
        codes, factors = (np.asarray(x).astype(np.uint32) for x in np.broadcast_arrays(*arguments))
    words, scales = (x[..., 0] | (x[..., 1] << np.uint32(16)) for x in (codes, factors))
    found = assemble(text, words, scales)
    assert len(found) == len(dtype)
    return tuple(tensor(np.stack([numbers_of(bits), numbers_of(bits >> np.uint32(16))], axis=-1)) for bits in found)


def _wait(_outstanding: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


class _Language(types.SimpleNamespace):
    """Stands in for `gl`."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__(
            program_id=lambda _axis: tensor(program),
            num_programs=lambda _axis: tensor(programs),
            arange=lambda start, end, _layout: tensor(np.arange(start, end)),
            load=lambda *args, **kwargs: tensor(load(*args, **kwargs)),
            store=store,
            maximum=lambda a, b: tensor(np.maximum(a, b)),
            minimum=lambda a, b: tensor(np.minimum(a, b)),
            where=lambda c, a, b: tensor(np.where(c, a, b)),
            exp=lambda x: tensor(np.exp(x)),
            zeros=lambda shape, _dtype, _layout: tensor(np.zeros(shape)),
            split=lambda x: (x[..., 0], x[..., 1]),
            join=lambda a, b: tensor(np.stack([a, b], axis=-1)),
            broadcast=lambda a, b: tuple(tensor(x) for x in np.broadcast_arrays(a, b)),
            convert_layout=lambda x, _layout: x,
            inline_asm_elementwise=_inline,
            allocate_shared_memory=self._allocate,
            static_range=range,
            warp_specialize=self._specialize,
            float32=np.float64, int32=np.int32, int16=np.int32, int64=np.int64, bfloat16=_BF16,
        )  # fmt: skip
        for name in ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"):
            setattr(self, name, lambda *_, **__: None)

    @staticmethod
    def _allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
        return Barriers(Barrier() for _ in range(shape[0])) if dtype is np.int64 else tensor(np.full(shape, np.nan))

    @staticmethod
    def _specialize(roles: list[Any], _warps: list[int], _registers: list[int]) -> None:
        failed: list[BaseException] = []

        def run(role: Any, arguments: Any) -> None:
            try:
                role(*arguments)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def _copy(desc: Map, at: list[Any], barrier: Barrier, box: Any) -> None:
    box[...] = desc.read([int(start) for start in at]).reshape(box.shape)
    barrier.add(-2 * box.size, arrives=False)


def run_product(
    weights: Map, inputs: Map, out: np.ndarray, scales: np.ndarray, bias: np.ndarray | None, order: np.ndarray,
    table: np.ndarray, numbers: tuple[Any, ...], tiling: CodesTiling, num_programs: int,
) -> None:  # fmt: skip
    """Every program of `hallmark_gluon_experts_codes`; arguments are the kernel's, `numbers` those behind the table."""
    for program in range(num_programs):
        bars = [Hardware() for _ in range(16)]
        names: dict[str, Any] = {
            "gl": _Language(program, num_programs),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: None, init=lambda *_, **__: None,
                wait=lambda bar, phase, pred=True: bar.wait(int(phase)) if pred else None,
                expect=lambda bar, count: bar.add(count, arrives=True),
            ),
            "tma": types.SimpleNamespace(async_copy_global_to_shared=_copy),
            "hardware_sync": lambda bar, of, bars=bars: bars[int(bar)].come(of % 128 or 128, of, waits=True),
            "hardware_arrive": lambda bar, of, bars=bars: bars[int(bar)].come(128, of, waits=False),
            "wait_for_previous_grid": lambda: None, "launch_next_grid": lambda: None,
            "warpgroup_mma_init": lambda x: x, "warpgroup_mma_wait": _wait,
            "warpgroup_mma": lambda a, b, acc, is_async: tensor(acc + np.matmul(a, b)),  # noqa: ARG005
            "codes_layout": lambda: None, "scales_layout": lambda: None, "prefetch": lambda _: None,
            "range": range, "max": max, "min": min,
        }  # fmt: skip
        for module in (products, many):
            for name, value in vars(module).items():
                if hasattr(value, "fn") and value.fn.__module__ == module.__name__ and name not in names:
                    names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
                elif type(value).__name__ == "constexpr" and (module is products or name not in names):
                    names[name] = value.value
        with np.errstate(all="ignore"):
            names["hallmark_gluon_experts_codes"](
                weights, inputs, Pointer(out.reshape(-1)), Pointer(scales.reshape(-1)),
                None if bias is None else Pointer(bias.reshape(-1)), Pointer(order), Pointer(table.reshape(-1)),
                *(array(n) if isinstance(n, int) else n for n in numbers), tiling,
            )  # fmt: skip
