"""Repeats calls of the library without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import gc
import itertools
import json
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sm90_driver import Recording
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from kernels import functional
from kernels.functional import ShapeError, attention_paged, attention_varlen
from kernels.vocabulary.fingerprint import Device, Fingerprint

BF16, INT = torch.bfloat16, torch.int32
PAGE = 64
UNREAD = 4  # bytes: `run` allocates one element where a kernel wants an address and reads nothing
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0", "3.6.0")


# What was handed over in each launch, and the memory that was allocated: addresses and bytes.
Call = tuple[list[tuple[Any, ...]], list[tuple[int, int]]]


class Recorder:
    """Keeps all that is handed over in every launch."""

    launches: list[tuple[Any, ...]] = []  # noqa: RUF012 -- of this program

    def __init__(self, source: Any, _metadata: Any) -> None:
        self.fn, self.types = source.fn.fn.__name__, tuple(source.signature.values())

    def __call__(self, *arguments: Any) -> None:
        """Launch as Triton's binder does: with its hooks, tensors, and constants as they are."""
        *before, options, _, _, _ = arguments[:9]
        places = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[9:])
        self.launch(*before, False, False, None, None, options, None, None, None, *places)

    def launch(self, *arguments: Any) -> None:
        given = (None if kind == "constexpr" else x for kind, x in zip(self.types, arguments[13:], strict=True))
        self.launches.append((self.fn, *(arguments[:13]), *given))


class Driver(Recording):
    """Functions have handles of their own, and the stream can be another."""

    handles = itertools.count(1)
    stream = 7
    launcher_cls = Recorder  # type: ignore[assignment]
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, next(Driver.handles), 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
        fill_tma_descriptor=lambda *of_map: ("map", *of_map),
        cuOccupancyMaxActiveClusters=lambda *_: 4,
    )

    def get_current_stream(self, _device: int) -> int:
        return self.stream


class Allocations(TorchDispatchMode):
    """Addresses and bytes of the memory that is allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []
        self.held: list[Tensor] = []  # or the next one would have the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and "empty" in str(func):
            self.found.append((made.data_ptr(), made.numel() * made.itemsize))
            self.held.append(made)
        return made


def heads_of(tokens: int, heads: int) -> Tensor:
    return torch.zeros(tokens, heads, 128, dtype=BF16)


def packed(lengths: list[int], *, has_context: bool = False, in_one: bool = False) -> dict[str, Any]:
    """Four query heads, two KV heads; in_one: q, k and v lie beside each other, as one product leaves them."""
    tokens, longest = sum(lengths), max(lengths)
    q, k, v = heads_of(tokens, 8).split([4, 2, 2], 1) if in_one else (heads_of(tokens, n) for n in (4, 2, 2))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts.clone() if has_context else starts,
        "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip


def paged(num_seqs: int, tokens: int, context: int, *, kv_heads: int = 2, skip: int = 0) -> dict[str, Any]:
    """Four query heads over pages that are every other one of their pool.

    skip: sequences that stand before these in the tensors of the batch, whose addresses are then no whole 16 bytes
    """
    k, v = torch.zeros(20, 2, PAGE, kv_heads, 128, dtype=BF16).unbind(1)
    starts = (torch.arange(skip + num_seqs + 1, dtype=INT) * tokens)[skip:]
    return {
        "q": heads_of(num_seqs * tokens, 4), "k_pages": k, "v_pages": v,
        "page_table": torch.zeros(num_seqs, 400, dtype=INT),
        "context_lens": torch.full((skip + num_seqs,), context, dtype=INT)[skip:],
        "cu_seqlens_q": starts, "max_seqlen_q": tokens, "max_context": context,
    }  # fmt: skip


def sinks() -> Tensor:
    return torch.zeros(4)


# Each makes the arguments of a call: every time other tensors. What follows the first is of the same form.
CASES: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "prompts": [lambda: packed([100, 30])],
    "prompts of other lengths": [lambda: packed([100, 30]), lambda: packed([65, 65]) | {"max_seqlen_q": 100}],
    "starts of keys that are the queries', or not": [
        lambda: packed([100, 30]),
        lambda: packed([100, 30], has_context=True),
    ],
    "prompts after a context, out of one product": [lambda: packed([300], has_context=True, in_one=True)],
    "prompts with flags": [
        lambda: packed([70, 8]) | {"window": 9, "softcap": 7.0, "softmax_scale": 0.3, "sinks": sinks()}
    ],
    "prompts under a short window": [
        lambda: packed([100, 30]) | {"window": 128, "sinks": sinks(), "path": "gluon.prefill.window.hopper"}
    ],
    "prompts with spans": [lambda: packed([70, 8]) | {"spans": torch.zeros(78, 2, dtype=INT)}],
    "an output that is given": [lambda: packed([100, 30]) | {"out": heads_of(130, 4)}],
    "chunks": [lambda context=context: paged(3, 40, context) for context in (200, 300, 900, 5000, 9000)],
    "a chunk in parts": [lambda context=context: paged(1, 40, context) for context in (2100, 4000, 3071, 3072, 20_000)],
    "many chunks in parts": [lambda: paged(9, 40, 9000) | {"sinks": sinks()}],
    "chunks with a window": [lambda: paged(2, 40, 5000) | {"window": 100}],
    "tokens": [lambda: paged(8, 1, 500), lambda: paged(8, 1, 511), lambda: paged(8, 1, 25_600)],
    "much context": [lambda context=context: paged(16, 1, context) for context in (16_000, 16_383, 16_384, 20_000)],
    "tokens with flags": [lambda: paged(3, 1, 500) | {"window": 100, "softcap": 7.0, "sinks": sinks()}],
    "one sequence": [lambda context=context: paged(1, 1, context, kv_heads=4) for context in (100, 3000, 4097, 4096)],
    "drafted tokens": [lambda: paged(3, 4, 500)],
    "prompts by Triton": [lambda: packed([70, 8]) | {"path": "triton.prefill"}],
    "prompts that see all of their keys": [
        lambda: packed([70, 8], has_context=True, in_one=True) | {"causal": False, "sinks": sinks()}
    ],
    "chunks by Triton": [lambda: paged(2, 40, 500, skip=1) | {"path": "triton.extend", "window": 9, "softcap": 7.0}],
    "tokens by Triton": [
        lambda context=context: paged(3, 1, context) | {"path": "triton.decode", "sinks": sinks()}
        for context in (32, 33, 64, 100, 500, 511)
    ],
    "one sequence by Triton": [lambda: paged(1, 1, 9000, kv_heads=1) | {"path": "triton.decode"}],
    "lengths at odd addresses": [lambda: paged(3, 1, 500, skip=1), lambda: paged(3, 1, 500)],
}


def call(arguments: dict[str, Any]) -> Call:
    """The launches of a call, and the memory it allocated."""
    Recorder.launches.clear()
    with Allocations() as allocations:
        (attention_paged if "page_table" in arguments else attention_varlen)(**arguments)
    return list(Recorder.launches), allocations.found


def rest_of_piece(at: Any, memory: list[tuple[int, int]]) -> int:
    """Bytes from an address to the end of the piece of memory that it lies in; 0 for what lies in none."""
    return next((start + size - at for start, size in memory if isinstance(at, int) and start <= at < start + size), 0)


def same(one: Call, other: Call) -> bool:
    """Return whether two calls pass the same arguments, each with memory of its own for the same contents."""
    (launches, memory), (others, of_other) = one, other
    if [len(launch) for launch in launches] != [len(launch) for launch in others]:
        return False
    places: set[tuple[int, int]] = set()
    for a, b in zip(itertools.chain(*launches), itertools.chain(*others), strict=True):
        rest = rest_of_piece(a, memory)
        if rest > UNREAD:
            places.add((a, b))
        elif rest == 0 and a != b:
            return False
    ends = [*(b for _, b in sorted(places, key=lambda pair: pair[1])[1:]), math.inf]
    for (a, b), end in zip(sorted(places, key=lambda pair: pair[1]), ends, strict=True):
        following = next((x for x, y in places if y == end), None)
        rest = rest_of_piece(a, memory)
        is_one_piece = following is not None and 0 < following - a < rest
        if not (end - b == following - a if is_one_piece else min(end - b, rest_of_piece(b, of_other)) >= rest):
            return False
    return True


def stop(*_: object) -> None:
    raise AssertionError("a prepared call is launched, not run")


def repeated(makers: list[Callable[[], dict[str, Any]]]) -> dict[str, object]:
    """Calls of one form beside the same calls while no form is known."""
    functional.known_calls.clear()
    kept: list[dict[str, Any]] = []
    wrong, prepared = [], 0
    for at, make in enumerate(makers):
        for _ in range(2):
            kept.append(make())
            call(kept[-1])  # checked, then prepared
        known = list(functional.known_calls.values())
        runs = [each.run for each in known]
        for stream in (7, 8):
            Driver.stream = stream
            kept.append(make())
            for each in known:
                each.run = stop
            found = call(kept[-1])
            prepared += 1
            for each, run in zip(known, runs, strict=True):
                each.run = run
            forms, functional.known_calls = functional.known_calls, {}
            expected = call(kept[-1])
            functional.known_calls = forms
            if not same(expected, found):
                wrong.append((at, stream, expected, found))
    return {"wrong": [str(each) for each in wrong], "prepared": prepared, "launches": len(found[0])}


def num_kept_alive() -> int:
    """Tensors that are alive because they were in a repeated call."""
    functional.known_calls.clear()
    references = []
    for make in (
        CASES["prompts"][0],
        CASES["a chunk in parts"][0],
        CASES["tokens with flags"][0],
        CASES["one sequence"][0],
    ):
        for _ in range(4):
            arguments = make()
            arguments["out"] = torch.zeros_like(arguments["q"])
            references += [weakref.ref(x) for x in arguments.values() if isinstance(x, Tensor)]
            call(arguments)
            del arguments
    gc.collect()
    assert len(functional.known_calls) == 4
    return sum(reference() is not None for reference in references)


def is_refused_after(repeats: int) -> bool:
    """Return whether a bound past the page table is refused after calls of the form."""
    functional.known_calls.clear()
    arguments = paged(3, 1, 500) | {"page_table": torch.zeros(3, 8, dtype=INT)}
    for _ in range(repeats):
        call(arguments)
    try:
        call(arguments | {"max_context": 8 * PAGE + 1})
    except ShapeError:
        return True
    return False


def main() -> None:
    driver.set_active(Driver())
    functional.read_fingerprint = lambda _: H200
    result = {
        "cases": {name: repeated(makers) for name, makers in CASES.items()},
        "kept_alive": num_kept_alive(),
        "refused": is_refused_after(3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
