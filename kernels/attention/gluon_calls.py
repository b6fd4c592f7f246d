"""What calls of all three Gluon kernels share: how they are launched and repeated, tensor maps, and factors of scores.

A launch is one tuple that Triton's compiled launcher takes. From layer to layer of a step only addresses of k and v
change in it. So the launches of a step's first layer are kept among its plans, by all that they were made of but these
addresses, and a later layer finds them by one lookup. By a second one it finds the whole tuple where k and v lie where
they lay before, as packed ones do, or else their tensor maps, which are kept from step to step: pages stay in place.
So tensors of calls that share plans are of one dtype, v lies as k, and out as that of every call for such q.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_variants import AnyTensor
from kernels.launch import Loaded
from kernels.path import RunAttention

_MAX_MAPS = 256  # of one form: more than a model has layers
_LOG2E = 1.4426950408889634
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Stands for every tensor map of this dtype and box: what Triton compiles in of one."""
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
    """Of the kernel's tensor maps the one at this place."""
    return TensorMap(kernel.encode, (*kernel.boxes[place], shape, strides, 0), (*shape, *strides))


class Maps(dict[tuple[int, int], tuple[object, ...]]):
    """The kernel's arguments for keys and values of one form, by their addresses: made when they are asked for."""

    def __init__(self, keys: TensorMap, values: TensorMap) -> None:
        self._keys, self._values = keys, values

    def __missing__(self, at: tuple[int, int]) -> tuple[object, ...]:
        if len(self) >= _MAX_MAPS:
            self.clear()
        k_at, v_at = at
        made = self[at] = (*self._keys.at(k_at), *self._values.at(v_at))
        return made


class Launches:
    """The launches of a call, to repeat over keys and values at other addresses, on the same stream.

    queries  the kernel's arguments before those of keys and values; rest: those behind them
    then     launches what follows
    held     tensors of the call's own
    form     what a call must have in common with this one, beside what it is found by
    """

    __slots__ = ("_after", "_before", "_held", "_launch", "_maps", "_then", "_whole", "form")

    def __init__(
        self,
        kernel: Loaded,
        num_programs: int,
        queries: tuple[object, ...],
        maps: Maps,
        rest: tuple[object, ...],
        *,
        then: Callable[[], object] | None = None,
        held: tuple[Tensor, ...] = (),
    ) -> None:
        self._launch, self._maps, self._then, self._held = kernel.launch, maps, then, held
        self._before = (*kernel.begin((num_programs, 1, 1)), *queries)
        self._after = (*rest, *kernel.tail)
        self._whole: dict[tuple[int, int], tuple[object, ...]] = {}
        self.form: tuple[object, ...] = ()

    def over(self, at: tuple[int, int]) -> bool:
        """Launch over the keys and values at these addresses; False where TMA cannot address them."""
        whole = self._whole.get(at)
        if whole is None:
            if (at[0] | at[1]) % 16:
                return False
            whole = self._whole[at] = (*self._before, *self._maps[at], *self._after)
        self._launch(*whole)
        if self._then is not None:
            self._then()
        return True


def repeated(
    prepare: Callable[[Tensor, Tensor, Tensor, AttentionBatch, AttentionFlags, Tensor], Launches | None],
) -> RunAttention:
    """A path's function, made of one that finds the launches of a call, and None where none are left to do."""

    @wraps(prepare)
    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        at, plans = (k.data_ptr(), v.data_ptr()), batch.plans
        if plans is not None:
            # To compare the form takes less than to hash it. Tensors are hashed: they would be compared by element.
            key = (prepare, q.data_ptr(), out.data_ptr(), flags.window, flags.sinks, flags.spans)
            form = (q.shape, q.stride(), k.shape, k.stride(), flags.scale, flags.softcap, flags.causal)
            known: Launches | None = plans.get(key)
            if known is not None and known.form == form and known.over(at):
                return
        launches = prepare(q, k, v, batch, flags, out)
        if launches is None:
            return
        launches.over(at)
        if plans is not None:
            launches.form = form
            plans[key] = launches

    return run


def scales(flags: AttentionFlags) -> tuple[float, float]:
    """What scores (with a softcap: their tanh) are multiplied by for exp2, and what scores are before tanh."""
    if flags.softcap is None:
        return flags.scale * _LOG2E, 1.0
    return flags.softcap * _LOG2E, flags.scale / flags.softcap
