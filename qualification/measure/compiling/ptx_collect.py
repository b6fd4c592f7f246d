"""Collect the PTX of the attention kernels on a machine without a GPU.

`python -m qualification.measure.compiling.ptx_collect`

Standard input has one JSON order (`Order`), standard output gets one JSON line a group of pairs (`Found`).

The module runs the `kernels` package that Python finds first, which may be another checkout's; so it imports only what
changes seldom. `_Gpu` makes tensors say that they are on a GPU, and gives those of floating-point numbers no memory;
the driver compiles for sm_90 and launches nothing. A compilation ends with PTX: ptxas does not run. Triton's cache
must be a folder of its own, for its entries hold PTX in place of machine code.
"""

import hashlib
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.errors import TritonError
from triton.runtime import driver

import kernels
from kernels.catalog import PATHS
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.compiling.pretended_gpu import H200, PretendedDriver, PretendedGenerator
from qualification.evidence.shape_text import parse_attention_shape
from qualification.measure.compiling.ptx import Found, Order, normalised
from qualification.measure.inputs.attention_inputs import cases, long_case

_DEVICE = torch.device("cuda", 0)
_TIMED_SEQUENCES = 8  # of the decode call that a qualification times
# An H100's and an H200's (SXM): kernels choose tiles and splits by them.
_PROPERTIES = SimpleNamespace(
    multi_processor_count=H200.num_processors, shared_memory_per_block_optin=H200.shared_bytes
)
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion")
_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, TritonError)
_MAX_ERROR = 500  # characters


class _Gpu(TorchFunctionMode):
    """Tensors are on a GPU by their word. Those of floating-point numbers have no memory, the others are on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return _DEVICE
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.Tensor.data_ptr and args[0].is_meta:  # as in a storage at a multiple of 16 bytes
            return (1 << 32) + args[0].storage_offset() * args[0].itemsize
        if func is torch.Tensor.__setitem__ and args[0].is_meta:
            return None
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            return args[0]
        if "device" in kwargs:
            dtype = kwargs.get("dtype")
            kwargs["device"] = "cpu" if dtype is None or not dtype.is_floating_point else "meta"
        return func(*args, **kwargs)


def stand_for_a_gpu(cache: Path) -> None:
    """Make torch and Triton of this process work as if there were an sm_90 GPU."""
    driver.set_active(PretendedDriver(H200))
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.store_binary_only = True  # what is before PTX takes four times its room
    triton.knobs.runtime.add_stages_inspection_hook = _end_with_ptx
    torch.cuda.get_device_properties = lambda _: _PROPERTIES  # type: ignore[assignment, misc]
    torch.Generator = PretendedGenerator  # type: ignore[assignment, misc]


def _end_with_ptx(_backend: object, stages: dict[str, Any], *_: object) -> None:
    stages["cubin"] = lambda ptx, _metadata: ptx.encode()


class _Collector:
    """Triton's listener: the digest of each kernel that is compiled, or found in Triton's cache, by its variant."""

    def __init__(self) -> None:
        self.variants: dict[str, str] = {}

    def __call__(self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        [file] = (path for name, path in metadata_group.items() if name.endswith(".cubin"))
        digest = hashlib.sha256(normalised(Path(file).read_text()).encode()).hexdigest()
        variant = variant_of(src, metadata)
        known = self.variants.setdefault(variant, digest)
        if known != digest:
            raise AssertionError(f"two kernels of one description: {variant}")


def variant_of(src: Any, metadata: dict[str, Any]) -> str:
    """A kernel's name, the type or value of each argument, and Triton's options."""
    names = src.fn.arg_names
    values = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}
    inner = {path: value for path, value in src.constants.items() if len(path) > 1}
    aligned = {names[path[0]] for path, found in src.attrs.items() if found}
    arguments = []
    for name, kind in src.signature.items():
        if name in values:
            arguments.append(f"{name}={values[name]!r}")
        else:
            arguments.append(f"{name}:{kind}{':16' if name in aligned else ''}")
    arguments += [f"{names[path[0]]}{list(path[1:])}={value!r}" for path, value in inner.items()]
    options = [f"{name}={metadata[name]}" for name in _OPTIONS if metadata.get(name) is not None]
    return f"{src.name}({', '.join(arguments)}) {' '.join(options)}"


def _call_all(shape: AttentionShape, run: RunAttention) -> None:
    """Make every kind of call that a qualification makes of this shape."""
    num_seqs = _TIMED_SEQUENCES if shape.phase is Phase.DECODE else 1
    for case in chain(cases(shape, _DEVICE, seed=0), [long_case(shape, _DEVICE, seed=0, num_seqs=num_seqs)]):
        out = torch.empty_like(case.q[..., : case.v.shape[-1]])
        run(case.q, case.k, case.v, case.batch, case.flags, out)


def _collect(pairs: Iterable[tuple[str, str]]) -> Found:
    """The variants of some (path, shape) pairs, those of paths that this catalog does not have left out."""
    runs = {path.name: path.run for path in PATHS}
    collector, failed = _Collector(), {}
    triton.knobs.compilation.listener = collector
    with _Gpu():
        for name, text in pairs:
            run = runs.get(name)
            if run is None:
                continue
            try:
                _call_all(parse_attention_shape(text), run)
            except _ERRORS as error:
                failed[f"{name} {text}"] = _one_line(error)
    return Found(collector.variants, failed)


def _one_line(error: Exception) -> str:
    """An error's type with its first and last line, between which Triton quotes a whole kernel."""
    lines = str(error).strip().splitlines() or ["no message"]
    message = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {message}"[:_MAX_ERROR]


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    start = partial(stand_for_a_gpu, Path(order.cache))
    head = {
        "triton": triton.__version__,
        "ptxas": re.findall(r"V(\d\S*)", get_ptxas_version(90))[-1],
        "kernels": str(Path(kernels.__file__).resolve().parent),
    }
    sys.stdout.buffer.write(msgspec.json.encode(head) + b"\n")
    sys.stdout.buffer.flush()  # or each process would write it again
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(order.num_processes, mp_context=context, initializer=start) as pool:
        for future in as_completed([pool.submit(_collect, group) for group in order.groups]):
            sys.stdout.buffer.write(msgspec.json.encode(future.result()) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
