"""Launches of the three Gluon kernels: how they are repeated, tensor maps, and factors of scores.

A launch is one tuple that Triton's compiled launcher takes. From layer to layer of a step only addresses of k, v and
sinks change in it. So the launches of a step's first layer are cached among its plans, by what distinguishes a model's
layers; a later layer finds them by one lookup, and compares the strides and addresses of its tensors. It passes the
whole tuple where k and v have the addresses of the layer before, as packed ones do. Otherwise it finds their tensor
maps, which are cached from step to step for pages, whose addresses do not change. v has k's dtype, and out q's.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.tma.pointers import AnyTensor, pointer_class

if TYPE_CHECKING:
    from kernels.vocabulary.path import RunAttention

_MAX_MAPS = 256  # of pages of one form: more than a model has layers
_LOG2E = 1.4426950408889634
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Return a stand-in for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [8] * (len(box) - 1) + [1], box, layout)


class TensorMap(NamedTuple):
    """A tensor map but for its address: the other arguments of `encode`, and the kernel's beside the map."""

    encode: Callable[..., object]
    layout: tuple[Any, ...]
    numbers: tuple[int, ...]

    def at(self, address: int) -> tuple[object, ...]:
        """The kernel's arguments."""
        return self.encode(address, *self.layout), *self.numbers


def tensor_map(kernel: Loaded, place: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """Return the kernel's tensor map at this place."""
    return TensorMap(kernel.encode, (*kernel.boxes[place], shape, strides, 0), (*shape, *strides))


class Maps(dict[tuple[int, int], tuple[object, ...]]):
    """The kernel's arguments for keys and values of one form, by their addresses: made when they are asked for.

    Empty where TMA cannot address them.
    """

    def __init__(self, keys: TensorMap, values: TensorMap) -> None:
        self._keys, self._values = keys, values

    def __missing__(self, at: tuple[int, int]) -> tuple[object, ...]:
        k_at, v_at = at
        if (k_at | v_at) % 16:
            return ()
        if len(self) >= _MAX_MAPS:
            self.clear()
        made = self[at] = (*self._keys.at(k_at), *self._values.at(v_at))
        return made


class Launches:
    """The launches of a call, to repeat over keys, values and sinks at other addresses.

    queries   the kernel's arguments before those of keys and values; rest: those behind them
    sinks_at  index of the sinks' address in `rest`
    then      launches the kernel that follows, whose argument `then_sinks_at` (an index) is the same address
    held      tensors of the call's own
    form      properties that a call must share to repeat this one, beside the key that it is found by
    """

    __slots__ = (
        "_after", "_at", "_before", "_held", "_launch", "_maps", "_sinks", "_sinks_at", "_stream", "_stream_now",
        "_then", "_then_sinks_at", "_whole", "form",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Loaded,
        num_programs: int,
        queries: tuple[object, ...],
        maps: Maps,
        rest: tuple[object, ...],
        *,
        sinks_at: int,
        then: partial[None] | None = None,
        then_sinks_at: int = 0,
        held: tuple[Tensor, ...] = (),
    ) -> None:
        self._launch, self._maps, self._then, self._held = kernel.launch, maps, then, held
        self._stream_now, self._stream = kernel.stream, kernel.stream()
        self._before = (*kernel.begin((num_programs, 1, 1)), *queries)
        self._after, self._sinks_at, self._then_sinks_at = (*rest, *kernel.tail), sinks_at, then_sinks_at
        self._at: tuple[int, int] | None = None
        self._whole: tuple[object, ...] = ()  # what was launched last
        self._sinks: Tensor | None = None
        self.form: tuple[object, ...] = ()

    def over(self, at: tuple[int, int], sinks: Tensor | None) -> bool:
        """Launch over the keys and values at these addresses; False where that needs another launch.

        sinks: first the call's own, then another layer's. Another launch is needed where TMA cannot address keys or
        values, for sinks that are not like those before, and on another stream.
        """
        if self._stream_now() != self._stream or (sinks is not self._sinks and not self._turn_to(sinks)):
            return False
        if at != self._at:
            maps = self._maps[at]
            if not maps:
                return False
            self._whole, self._at = self._before + maps + self._after, at
        self._launch(*self._whole)
        if self._then is not None:
            self._then()
        return True

    def _turn_to(self, sinks: Tensor | None) -> bool:
        """Hand over the address of other sinks, where kernels compiled for the ones before take it."""
        before = self._sinks
        if not self._whole:  # the first ones are in place
            self._sinks = sinks
            return True
        if before is None or sinks is None or pointer_class(sinks) != pointer_class(before):
            return False
        address = sinks.data_ptr()
        self._after = _replaced(self._after, self._sinks_at, address)
        if self._then is not None:
            self._then = partial(self._then.func, *_replaced(self._then.args, self._then_sinks_at, address))
        self._sinks, self._at = sinks, None
        return True


def _replaced(values: tuple[object, ...], index: int, value: object) -> tuple[object, ...]:
    return (*values[:index], value, *values[index + 1 :])


def repeated(
    prepare: Callable[[Tensor, Tensor, Tensor, AttentionBatch, AttentionFlags, Tensor], Launches | None],
) -> "RunAttention":
    """A path's function, made of one that finds the launches of a call, and None where none are left to do."""

    @wraps(prepare)
    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        at, sinks, plans = (k.data_ptr(), v.data_ptr()), flags.sinks, batch.plans
        if plans is not None:
            # To compare the form takes less than to hash it. Spans are hashed: they would be compared by element.
            key = (prepare, q.data_ptr(), out.data_ptr(), flags.window, sinks is None, flags.spans)
            form = (
                q.shape, q.stride(), q.dtype, out.is_contiguous() or out.stride(), k.shape, k.dtype,
                k.is_contiguous() or k.stride(), v.is_contiguous() or v.stride(), flags.scale, flags.softcap,
                flags.causal,
            )  # fmt: skip
            known: Launches | None = plans.get(key)
            if known is not None and known.form == form and known.over(at, sinks):
                return
        launches = prepare(q, k, v, batch, flags, out)
        if launches is None:
            return
        is_launched = launches.over(at, sinks)
        assert is_launched, "a path prepares what TMA can address"
        if plans is not None:
            launches.form = form
            plans[key] = launches

    return run


def scales(flags: AttentionFlags) -> tuple[float, float]:
    """Return the factor of scores (with a softcap: of their tanh) for exp2, and the factor of scores before tanh."""
    if flags.softcap is None:
        return flags.scale * _LOG2E, 1.0
    return flags.softcap * _LOG2E, flags.scale / flags.softcap
