"""Compiles the kernels of the attention tests marked `gpu` for an sm_90 GPU, in processes side by side.

PYTHONPATH=.:tests:tests/kernels python -m support.compiled.compile_gpu_tests [--jobs N] [--count]

The kernels of these tests take twenty minutes of a core to compile. Each is compiled once here, the slowest first, into
Triton's cache on disk, where the workers of pytest then find all of them. First every test is called with tensors that
have no memory and a stand-in for the driver: what it asks Triton for is kept, and where the test would look at a result
it ends. A test that asks for other kernels on a GPU compiles them itself, as without this program.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import driver

import kernels.calls.processors
import kernels.system.device
from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from kernels.system.triton_cache import use_own_cache
from kernels.vocabulary.fingerprint import Device, Fingerprint
from qualification.compiling.wanted import WantedKernels, name_of
from support.compiled.sm90_driver import Recording

MODULES = ("test_gpu_attention", "test_gpu_calls")
NUM_PROCESSORS = 132  # of an H100 SXM and an H200
# Kernels by the seconds of one variant (5.8, 3.1, 2.1, on one core of a Xeon); the others take up to 1.8.
SLOWEST = ("hallmark_gluon_extend", "hallmark_gluon_prefill", "hallmark_gluon_decode")
ENDS = (pytest.skip.Exception, pytest.fail.Exception, NotImplementedError, RuntimeError, ValueError, AssertionError)


class WithoutMemory(TorchFunctionMode):
    """Tensors for a GPU have shapes only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(given: Any) -> Any:
            return torch.device("meta") if isinstance(given, torch.device) and given.type == "cuda" else given

        return func(*map(moved, args), **{name: moved(given) for name, given in (kwargs or {}).items()})


def stand_in() -> None:
    """Show an sm_90 GPU to the code of this process."""
    driver.set_active(Recording())
    gpu = Fingerprint(Device.CUDA, "", 90, None, None, None, "", "")
    kernels.calls.processors.num_processors = lambda _: NUM_PROCESSORS  # type: ignore[assignment]
    kernels.calls.processors.shared_bytes = lambda _: SHARED_BYTES_HOPPER  # type: ignore[assignment]
    kernels.system.device.read_fingerprint = lambda _: gpu  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=NUM_PROCESSORS)  # type: ignore


def calls(module: Any) -> Iterator[Callable[[], None]]:
    """Every test of a module with each of its parameters, of a series with each member alone: a call ends early."""
    for name, test in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        choices: list[list[dict[str, Any]]] = []
        for mark in getattr(test, "pytestmark", []):
            if mark.name != "parametrize":
                continue
            names, values = mark.args
            names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
            if len(names) == 1:
                values = [((it,),) for value in values if isinstance(value, tuple) for it in value] or [
                    (it,) for it in values
                ]
            choices.append([dict(zip(names, it, strict=True)) for it in values])
        for chosen in itertools.product(*choices):
            parameters = {name: value for each in chosen for name, value in each.items()}
            yield partial(test, **parameters)


def is_on_sm90() -> bool:
    """Return whether the first GPU is one that this program compiles for; True without a GPU."""
    if not torch.cuda.is_available():
        return True
    found = torch.cuda.get_device_properties(0)
    return (found.major, found.minor, found.multi_processor_count) == (9, 0, NUM_PROCESSORS)


WANTED: list[Callable[[], object]] = []  # of this program, for the processes that it forks


def compile_one(index: int) -> str | None:
    """Return why it could not be compiled."""
    try:
        WANTED[index]()
    except Exception as error:  # a test that wants this kernel will fail, and say why
        return f"{name_of(WANTED[index])}: {type(error).__name__}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--count", action="store_true", help="compile nothing: print how many variants of each kernel")
    args = parser.parse_args()
    forked = multiprocessing.get_context("fork")
    with forked.Pool(1) as pool:  # this process never begins to use the GPU: it could not fork then
        if not pool.apply(is_on_sm90):
            print(
                f"compiles ahead for sm_90 GPUs of {NUM_PROCESSORS} multiprocessors only: the tests compile themselves"
            )
            return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    use_own_cache()
    began = time.monotonic()
    stand_in()
    mode = WantedKernels()
    with mode:
        for name in MODULES:
            for call in calls(importlib.import_module(name)):
                with WithoutMemory(), suppress(*ENDS), redirect_stdout(None):
                    call()
    variants = Counter(map(name_of, mode.by_key.values()))
    if args.count:
        print(json.dumps(variants))
        return
    WANTED.extend(sorted(mode.by_key.values(), key=lambda it: (*SLOWEST, name_of(it)).index(name_of(it))))
    with forked.Pool(args.jobs) as pool:
        answers = pool.imap_unordered(compile_one, range(len(WANTED)))
        failures = [failure for failure in answers if failure is not None]
    seconds = time.monotonic() - began
    print(*failures, f"{variants.total()} kernels compiled by {args.jobs} processes in {seconds:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
