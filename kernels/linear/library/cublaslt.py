"""cuBLASLt by ctypes: products with a weight by algorithms that the caller picks among those the library proposes.

The library comes with PyTorch, which has it loaded. It counts columns first: y [M, N] = x [M, K] @ weight [N, K]^T is
there the N x M product of the weight, transposed, and x. Sums across parts of the inner dim are fp32 and of a fixed
order (reduction scheme COMPUTE_TYPE, or none), so a result is the same in every call. Source: cublasLt.h of CUDA 13.0.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20  # what PyTorch gives it on sm_90
_MOST = 8  # that it is asked for; of 24 it gave 8, too
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_32F = 68
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_SCHEME = 3  # cublasLtMatmulAlgoConfigAttributes_t
_IN_FP32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; 1 sums in place and 4 in the result's 16 bits
_ANY_SCHEME = 7  # asked so, the library proposes others of those that sum in fp32 or not at all too


class CublasLtError(Exception):
    """The library is not there, or refuses; the message says which."""


@dataclass(frozen=True, slots=True)
class Product:
    """x [num_rows, size_in] @ weight [size_out, size_in]^T, both of one 16-bit dtype, all contiguous."""

    num_rows: int
    size_out: int
    size_in: int
    dtype: torch.dtype
    dtype_out: torch.dtype


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: how a product may be computed, for any number of rows that it accepts."""

    _fields_ = [
        ("words", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]

    @classmethod
    def of_words(cls, words: Sequence[int]) -> "Algorithm":
        """Return an algorithm that this version of the library proposed before. Raises TypeError for what is none."""
        return cls((c_uint64 * 8)(*words))


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The one that PyTorch loaded. Raises CublasLtError."""
    if torch.version.cuda is None:
        raise CublasLtError("torch is built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        _declare(library)
    except (OSError, AttributeError) as error:
        raise CublasLtError(f"{name}: {error}") from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.cublasLtGetVersion.restype = c_size_t
    library.cublasLtCreate.argtypes = [c_void_p]
    library.cublasLtMatmulDescCreate.argtypes = [c_void_p, c_int, c_int]
    library.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    library.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
    library.cublasLtMatmulPreferenceCreate.argtypes = [c_void_p]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[c_void_p] * 7, c_int, c_void_p, c_void_p]
    library.cublasLtMatmulAlgoCheck.argtypes = [c_void_p] * 8
    library.cublasLtMatmulAlgoConfigGetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t, c_void_p]
    library.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A product that can be launched: by an algorithm that accepts its number of rows."""

    weight: int  # these three are the library's layouts
    x: int
    y: int
    algorithm: Algorithm


class CublasLt:
    """The library on one device, for one thread. A stream's workspace is never freed: 32 MiB."""

    alignment_bytes = 256  # of x, weight and y: less than PyTorch's allocator gives, and the library's default

    def __init__(
        self,
        library: ctypes.CDLL,
        device: torch.device,
        *,
        current_device: Callable[[], int] = torch.cuda.current_device,
    ) -> None:
        """Raises CublasLtError where the library does not start. `current_device`: for tests."""
        self._library = library
        self._device = device
        self._current_device = current_device
        self._index = current_device() if device.index is None else device.index
        self._handle, self._operation = c_void_p(), c_void_p()
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._layouts: dict[tuple[torch.dtype, int, int], int] = {}
        self._workspaces: dict[int, Tensor] = {}
        # A handle is of the device that is the current one when it is made.
        with torch.cuda.device(self._index) if device.type == "cuda" else nullcontext():
            self._ask("Create", byref(self._handle))
        self._ask("MatmulDescCreate", byref(self._operation), _COMPUTE_32F, _TYPES[torch.float32])
        self._ask("MatmulDescSetAttribute", self._operation, _TRANSPOSE_A, byref(c_int(1)), 4)
        self._preferences = tuple(self._preference(schemes) for schemes in (_IN_FP32, _ANY_SCHEME))

    @property
    def version(self) -> int:
        """130100 for 13.1.0."""
        return int(self._library.cublasLtGetVersion())

    def algorithms(self, product: Product) -> list[Algorithm]:
        """Return 8 to 16 algorithms, the likeliest to be fast first; none where the library has no such product."""
        proposed = {
            tuple(it.words): it for preference in self._preferences for it in self._proposed(product, preference)
        }
        return list(proposed.values())

    def prepared(self, product: Product, algorithm: Algorithm) -> Prepared | None:
        """The product by that algorithm; None where it does not take so many rows."""
        (a, b, d), checked = self._layouts_of(product), Algorithm()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._operation, a, b, d, d, byref(algorithm), byref(checked)
        )
        if status or checked.workspace_bytes > WORKSPACE_BYTES:
            return None
        return Prepared(a, b, d, algorithm)

    def launch(self, prepared: Prepared, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Fill y on the current stream. Raises CublasLtError where that fails, or where another device is current."""
        if (current := self._current_device()) != self._index:
            raise CublasLtError(f"the handle is of device {self._index}, the current one is {current}")
        # As Triton asks for it: a Stream object takes 4 us (one H200's host).
        stream: int = torch._C._cuda_getCurrentRawStream(self._index)
        workspace = self._workspaces.get(stream)
        if workspace is None:  # a stream's own: products of two streams may run at the same time
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._workspaces[stream] = workspace
        at = y.data_ptr()
        status = self._library.cublasLtMatmul(
            self._handle, self._operation, byref(self._one), weight.data_ptr(), prepared.weight, x.data_ptr(),
            prepared.x, byref(self._zero), at, prepared.y, at, prepared.y, byref(prepared.algorithm),
            workspace.data_ptr(), WORKSPACE_BYTES, stream,
        )  # fmt: skip
        if status:
            raise CublasLtError(f"cublasLtMatmul returned {status}")

    def _proposed(self, product: Product, preference: c_void_p) -> list[Algorithm]:
        found, count = (Algorithm * _MOST)(), c_int()
        a, b, d = self._layouts_of(product)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, a, b, d, d, preference, _MOST, found, byref(count)
        )
        if status:
            return []
        copies = (Algorithm.from_buffer_copy(found[index]) for index in range(count.value))
        return [algorithm for algorithm in copies if not algorithm.status and self._sums_in_order(algorithm)]

    def _layouts_of(self, product: Product) -> tuple[int, int, int]:
        """Return the layouts of the weight, x and y."""
        rows, size_out, size_in = product.num_rows, product.size_out, product.size_in
        return (
            self._layout(product.dtype, size_in, size_out),
            self._layout(product.dtype, size_in, rows),
            self._layout(product.dtype_out, size_out, rows),
        )

    def _layout(self, dtype: torch.dtype, size: int, rows: int) -> int:
        """Return a layout of contiguous rows. It is never freed: 64 bytes."""
        key = (dtype, size, rows)
        if key not in self._layouts:
            made = c_void_p()
            self._ask("MatrixLayoutCreate", byref(made), _TYPES[dtype], size, rows, size)
            assert made.value is not None
            self._layouts[key] = made.value
        return self._layouts[key]

    def _sums_in_order(self, algorithm: Algorithm) -> bool:
        """Return whether an algorithm sums parts of the inner dim in fp32, if it splits it at all."""
        scheme, written = c_uint32(), c_size_t()
        self._ask("MatmulAlgoConfigGetAttribute", byref(algorithm), _SCHEME, byref(scheme), 4, byref(written))
        return scheme.value in (0, _IN_FP32)

    def _preference(self, schemes: int) -> c_void_p:
        """Kept for good."""
        made, set_attribute = c_void_p(), "MatmulPreferenceSetAttribute"
        self._ask("MatmulPreferenceCreate", byref(made))
        self._ask(set_attribute, made, _MAX_WORKSPACE, byref(c_uint64(WORKSPACE_BYTES)), 8)
        self._ask(set_attribute, made, _REDUCTION_SCHEMES, byref(c_uint32(schemes)), 4)
        return made

    def _ask(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            raise CublasLtError(f"cublasLt{function} returned {status}")
