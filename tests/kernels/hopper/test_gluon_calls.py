"""Repeated launches of a call and the arguments that they pass: with a kernel that records, on any machine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.tma.launches import Launches, Maps, TensorMap, repeated
from kernels.vocabulary.path import RunAttention

FLAGS = AttentionFlags(0.1)
SINKS = torch.zeros(4)


class Kernel:
    """Stands in for a loaded one; its tensor maps are their addresses."""

    tail = (None,)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.current_stream = 0

    def stream(self) -> int:
        return self.current_stream

    def begin(self, grid: tuple[int, int, int]) -> tuple[object, ...]:
        return grid

    def launch(self, *arguments: object) -> None:
        self.launches.append(arguments)


class Path:
    """A path's function that counts how often its launches are made, of a kernel that records them."""

    def __init__(self) -> None:
        self.kernel, self.num_prepared = Kernel(), 0
        self.after: list[int | None] = []  # addresses of the sinks of the launch that follows
        self.same: list[int | None] = []  # an argument of it that is the first layer's address by chance
        self.run: RunAttention = repeated(self._prepare)

    def _follow(self, same: int | None, sinks: int | None) -> None:
        self.same.append(same)
        self.after.append(sinks)

    def _prepare(
        self, q: Tensor, k: Tensor, v: Tensor, _batch: AttentionBatch, flags: AttentionFlags, out: Tensor
    ) -> Launches | None:
        self.num_prepared += 1
        if (k.data_ptr() | v.data_ptr()) % 16:
            return None  # as the path of prefill
        maps = Maps(*(TensorMap(lambda address, *_: address, (), (kind,)) for kind in (7, 8)))
        sinks_at = None if flags.sinks is None else flags.sinks.data_ptr()
        queries, rest = (q.data_ptr(),), (out.data_ptr(), sinks_at)
        then = partial(self._follow, sinks_at, sinks_at)  # equal values: only the index tells them apart
        return Launches(self.kernel, 132, queries, maps, rest, sinks_at=1, then=then, then_sinks_at=1)  # type: ignore[arg-type]


def inputs(tokens: int = 3) -> list[Tensor]:
    """q, k, v and out."""
    return [torch.zeros(tokens, heads, 64) for heads in (8, 2, 2, 8)]


def batch_of_a_step() -> AttentionBatch:
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    return AttentionBatch(cu_seqlens, 3, 3, cu_seqlens_k=cu_seqlens, plans={})


def test_a_later_layer_repeats_launches_over_its_keys() -> None:
    path, batch = Path(), batch_of_a_step()
    q, k, v, out = inputs()
    for keys, values in ((k, v), (v, k), (k, v)):
        path.run(q, keys, values, batch, AttentionFlags(0.1), out)
        expected = (132, 1, 1, q.data_ptr(), keys.data_ptr(), 7, values.data_ptr(), 8, out.data_ptr(), None, None)
        assert path.kernel.launches[-1] == expected
    assert (path.num_prepared, len(path.kernel.launches), len(path.after)) == (1, 3, 3)


def test_a_batch_without_plans_keeps_nothing() -> None:
    path = Path()
    q, k, v, out = inputs()
    batch = AttentionBatch(torch.tensor([0, 3], dtype=torch.int32), 3, 3)
    path.run(q, k, v, batch, FLAGS, out)
    path.run(q, k, v, batch, FLAGS, out)
    assert (path.num_prepared, len(path.kernel.launches)) == (2, 2)


# What another layer may have where this one's tensors lay: of (q, k, v, out) and flags.
OTHERS: dict[str, Callable[[list[Tensor]], tuple[list[Tensor], AttentionFlags]]] = {
    "heads of another size": lambda x: ([x[0].view(3, 4, 128), *x[1:3], x[3].view(3, 4, 128)], FLAGS),
    "queries in another order": lambda x: ([x[0].view(8, 3, 64).transpose(0, 1), *x[1:]], FLAGS),
    "other KV heads": lambda x: ([x[0], x[1].view(3, 1, 128), x[2].view(3, 1, 128), x[3]], FLAGS),
    "fewer keys": lambda x: ([x[0], x[1][:2], x[2][:2], x[3]], FLAGS),
    "keys in another order": lambda x: ([x[0], *(y.view(2, 3, 64).transpose(0, 1) for y in x[1:3]), x[3]], FLAGS),
    "values in another order": lambda x: ([*x[:2], x[2].view(2, 3, 64).transpose(0, 1), x[3]], FLAGS),
    "an output in another order": lambda x: ([*x[:3], x[3].view(8, 3, 64).transpose(0, 1)], FLAGS),
    "queries of another dtype": lambda x: ([x[0].view(torch.int32), *x[1:]], FLAGS),
    "keys of another dtype": lambda x: ([x[0], x[1].view(torch.int32), *x[2:]], FLAGS),
    "queries elsewhere": lambda x: ([x[0].clone(), *x[1:]], FLAGS),
    "an output elsewhere": lambda x: ([*x[:3], x[3].clone()], FLAGS),
    "keys at an odd address": lambda x: ([x[0], torch.zeros(3 * 128 + 1)[1:].view(3, 2, 64), *x[2:]], FLAGS),
    "another scale": lambda x: (x, AttentionFlags(0.2)),
    "a window": lambda x: (x, AttentionFlags(0.1, window=7)),
    "a softcap": lambda x: (x, AttentionFlags(0.1, softcap=7.0)),
    "sinks": lambda x: (x, AttentionFlags(0.1, sinks=SINKS)),
    "spans": lambda x: (x, AttentionFlags(0.1, spans=torch.zeros(3, 2, dtype=torch.int32))),
    "a full mask": lambda x: (x, AttentionFlags(0.1, causal=False)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_differences_than_addresses_prepare_anew(name: str) -> None:
    path, batch, first = Path(), batch_of_a_step(), inputs()
    (q, k, v, out), flags = OTHERS[name](first)
    path.run(*first[:3], batch, FLAGS, first[3])
    path.run(q, k, v, batch, flags, out)
    assert path.num_prepared == 2


def test_sinks_of_later_layers_are_passed_by_index() -> None:
    path, batch = Path(), batch_of_a_step()
    q, k, v, out = inputs()
    of_layers = [torch.zeros(4) for _ in range(2)] * 2
    for sinks in of_layers:
        path.run(q, k, v, batch, AttentionFlags(0.1, sinks=sinks), out)
    assert path.num_prepared == 1
    assert [arguments[-2] for arguments in path.kernel.launches] == [sinks.data_ptr() for sinks in of_layers]
    assert path.after == [sinks.data_ptr() for sinks in of_layers]
    assert set(path.same) == {of_layers[0].data_ptr()}  # an equal value is not mistaken for the sinks


@pytest.mark.parametrize("sinks", [torch.zeros(5)[1:], torch.zeros(4, dtype=torch.int32)])
def test_sinks_of_another_pointer_class_prepare_anew(sinks: Tensor) -> None:
    path, batch = Path(), batch_of_a_step()
    q, k, v, out = inputs()
    for each in (SINKS, sinks):
        path.run(q, k, v, batch, AttentionFlags(0.1, sinks=each), out)
    assert path.num_prepared == 2


def test_alternating_layers_are_each_repeated() -> None:
    path, batch = Path(), batch_of_a_step()
    q, k, v, out = inputs()
    forms = [AttentionFlags(0.1, window=window, sinks=sinks) for window in (None, 7) for sinks in (None, SINKS)]
    for flags in forms * 3:
        path.run(q, k, v, batch, flags, out)
    assert path.num_prepared == len(forms)


def test_a_call_on_another_stream_is_prepared_anew() -> None:
    path, batch = Path(), batch_of_a_step()
    q, k, v, out = inputs()
    path.run(q, k, v, batch, FLAGS, out)
    path.kernel.current_stream = 1
    for _ in range(2):
        path.run(q, k, v, batch, FLAGS, out)
    assert path.num_prepared == 2


def test_two_paths_of_a_step_do_not_repeat_each_other() -> None:
    first, second, batch = Path(), Path(), batch_of_a_step()
    q, k, v, out = inputs()
    first.run(q, k, v, batch, FLAGS, out)
    second.run(q, k, v, batch, FLAGS, out)
    assert (first.num_prepared, second.num_prepared) == (1, 1)


def test_maps_of_passing_addresses_do_not_grow_for_ever() -> None:
    made = []
    maps = Maps(TensorMap(lambda address, *_: made.append(address), (), ()), TensorMap(lambda *_: None, (), ()))
    for address in range(0, 16 * 1024, 16):
        assert len(maps[address, 0]) == len(maps[address, 0]) == 2
        assert len(maps) <= 256
    assert len(made) == 1024


def test_there_is_no_map_of_an_address_that_tma_cannot_reach() -> None:
    maps = Maps(*(TensorMap(lambda address, *_: address, (), ()) for _ in range(2)))
    assert maps[32, 8] == maps[8, 32] == ()
    assert maps[32, 16] == (32, 16)
