"""Products by cuBLASLt in the order of `ordered.py`: by those of its algorithms whose bits equal that kernel's.

An algorithm that splits the inner dim, or that another version of the library sums otherwise, is found unequal on
seeded numbers and never launched: the kernel itself multiplies where none is equal. SwiGLU is computed by the kernel
behind the product, of gate and up as stored; a bias is added to sums in fp32, before the only rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import Algorithm, CublasLt, CublasLtError, Prepared, Product, load_library
from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.linear.library.library_path import Choices, Note, RunProposed, Sizes
from kernels.linear.weights import PlainWeight

_MOST_EQUAL = 8  # algorithms of a product, the likeliest to be fast first: each is proven
_SEED = 20
_SCALE = 0.05  # of a seeded weight: sums of thousands of columns stay far below fp16's largest number


# Fills `out`, its last argument, in the order; the others are those of `run_ordered`.
RunOwn = Callable[[Tensor, Any, Tensor | None, Epilogue, Tensor], None]


@dataclass(frozen=True, slots=True)
class RunProposedInOrder(RunProposed):
    """A product by one algorithm of equal bits: a proof must hold for each that `RunMeasuredInOrder` may choose.

    index  among the equal algorithms for the number of rows, from 0 again where it is beyond them; None for the kernel
           of our own, which also computes what no algorithm of equal bits takes
    """

    @property
    def variants(self) -> "tuple[RunProposedInOrder, ...]":
        """Return one call for every algorithm that may be chosen."""
        return (RunProposedInOrder(None), *(RunProposedInOrder(index) for index in range(_MOST_EQUAL)))

    def __call__(self, x: Tensor, weight: PlainWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        """Fill out [rows, size_out]. Raises RuntimeError where the library is missing or does not launch."""
        if self.index is None:
            return run_own(x, weight, bias, epilogue, out)
        try:
            library = _library_on(x.device)
            product = Product(x.shape[0], *weight.size, x.dtype, dtype_of_sums(x.dtype, bias is not None, epilogue))
            equal = _equal(x.device, product) if is_suitable(library, x, weight) else ()
            if not equal:
                return run_own(x, weight, bias, epilogue, out)
            _launch(library, equal[self.index % len(equal)], x, weight, bias, epilogue, out)
        except CublasLtError as error:
            raise RuntimeError(str(error)) from error
        return None


class RunMeasuredInOrder:
    """The products of an engine: each by the fastest algorithm of equal bits, else by the kernel of our own.

    For one device and one thread.
    """

    def __init__(self, note: Note, own: RunOwn | None = None) -> None:
        """`note`: gets what our own kernel multiplies though an algorithm was measured for it. `own`: for tests."""
        self._note = note
        self.own: RunOwn = own or run_own
        self._library: CublasLt | None = None
        self._choices: dict[Sizes, Choices] = {}
        # By the number of rows and the sizes. None: our own kernel multiplies.
        self._prepared: dict[tuple[int, Sizes], Prepared | None] = {}

    def choose(self, library: CublasLt, choices: Mapping[Sizes, Choices]) -> None:
        """Multiply by these algorithms from now on: before the first step that is served."""
        self._library = library
        self._choices = dict(choices)
        self._prepared.clear()

    @property
    def choices(self) -> Mapping[Sizes, Choices]:
        """Return the measured algorithms."""
        return dict(self._choices)

    def __call__(self, x: Tensor, weight: PlainWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        """Fill out [rows, size_out]; by our own kernel where the library fails, and from then on."""
        library = self._library
        if library is None:
            return self.own(x, weight, bias, epilogue, out)
        sizes = *weight.size, weight.dtype, dtype_of_sums(x.dtype, bias is not None, epilogue)
        key = x.shape[0], sizes
        if key not in self._prepared:
            self._prepared[key] = self._prepare(library, *key)
        prepared = self._prepared[key]
        if prepared is None or not is_suitable(library, x, weight):
            return self.own(x, weight, bias, epilogue, out)
        try:
            _launch(library, prepared, x, weight, bias, epilogue, out)
        except CublasLtError as error:
            self._prepared[key] = None
            self._note(MatmulFallback.LAUNCH_FAILED, _text(key), error)
            self.own(x, weight, bias, epilogue, out)
        return None

    def _prepare(self, library: CublasLt, num_rows: int, sizes: Sizes) -> Prepared | None:
        """Return the product by the algorithm of the next larger number of rows that was measured.

        Whichever serves, the bits are the same: what was measured is only its speed.
        """
        choices = self._choices.get(sizes, {})
        measured = min((size for size in choices if size >= num_rows), default=None)
        algorithm = None if measured is None else choices[measured]
        if algorithm is None:
            return None
        try:
            prepared = library.prepared(Product(num_rows, *sizes), algorithm)
        except CublasLtError as error:
            self._note(MatmulFallback.ROWS_REFUSED, _text((num_rows, sizes)), error)
            return None
        if prepared is None:
            detail = "the chosen algorithm does not take them"
            self._note(MatmulFallback.ROWS_REFUSED, _text((num_rows, sizes)), detail)
        return prepared


def is_suitable(library: CublasLt, x: Tensor, weight: PlainWeight) -> bool:
    """Return whether the library takes these inputs: contiguous, of one dtype, aligned."""
    aligned = (x.data_ptr() | weight.values.data_ptr()) % library.alignment_bytes == 0
    return aligned and x.dtype is weight.dtype and x.is_contiguous()


def dtype_of_sums(dtype: torch.dtype, has_bias: bool, epilogue: Epilogue) -> torch.dtype:
    """Return the dtype in which the library stores a product of x in `dtype`."""
    return torch.float32 if has_bias or epilogue is Epilogue.FP32 else dtype


def equal_algorithms(
    library: CublasLt, product: Product, x: Tensor, weight: Tensor, fewest: int, own: RunOwn | None = None
) -> list[tuple[Algorithm, Prepared]]:
    """Return the proposed algorithms whose bits equal the kernel's, of x [num_rows, K] and weight [N, K].

    fewest: rows that the algorithms must give the kernel's bits for, too, where they take so few. own: for tests.
    """
    epilogue = Epilogue.FP32 if product.dtype_out is torch.float32 else Epilogue.NONE
    expected = x.new_empty(product.num_rows, product.size_out, dtype=product.dtype_out)
    (own or run_own)(x, PlainWeight(weight), None, epilogue, expected)
    few = replace(product, num_rows=fewest)
    found, y = [], torch.empty_like(expected)
    for algorithm in library.algorithms(product):
        prepared, of_few = library.prepared(product, algorithm), library.prepared(few, algorithm)
        calls = [it for it in ((prepared, product.num_rows), (of_few, fewest)) if it[0] is not None]
        if prepared is not None and all(
            _gives(library, launched, x[:rows], weight, y[:rows], expected[:rows])
            for launched, rows in calls
            if launched is not None
        ):
            found.append((algorithm, prepared))
    return found[:_MOST_EQUAL]


def _gives(library: CublasLt, prepared: Prepared, x: Tensor, weight: Tensor, y: Tensor, expected: Tensor) -> bool:
    """Return whether the product fills y with the expected bits."""
    y.fill_(torch.nan)
    library.launch(prepared, x, weight, y)
    bits = torch.int32 if y.dtype is torch.float32 else torch.int16
    return torch.equal(y.view(bits), expected.view(bits))


def run_own(x: Tensor, weight: PlainWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """`run_ordered`, whose module cannot be imported where there is no Triton."""
    from kernels.linear.ordered.matmul_path import run_ordered

    run_ordered(x, weight, bias, epilogue, out)


def _launch(
    library: CublasLt,
    prepared: Prepared,
    x: Tensor,
    weight: PlainWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    out: Tensor,
) -> None:
    if epilogue is not Epilogue.SWIGLU and bias is None:
        library.launch(prepared, x, weight.values, out)
        return
    sums = x.new_empty(x.shape[0], weight.size[0], dtype=x.dtype if bias is None else torch.float32)
    library.launch(prepared, x, weight.values, sums)
    if bias is None:
        swiglu(sums, out)
    else:
        torch.add(sums, bias, out=out)


def _text(key: tuple[int, Sizes]) -> str:
    num_rows, (size_out, size_in, *_) = key
    return f"{num_rows} rows by a weight of {size_out} x {size_in}"


# A pure function of the library and the product: the numbers are seeded.
@lru_cache(maxsize=4096)
def _equal(device: torch.device, product: Product) -> tuple[Prepared, ...]:
    """Return the algorithms of equal bits, prepared for the product."""
    generator = torch.Generator(device).manual_seed(_SEED)
    options = {"generator": generator, "device": device, "dtype": product.dtype}
    x = torch.randn(product.num_rows, product.size_in, **options)  # type: ignore[call-overload]
    weight = torch.randn(product.size_out, product.size_in, **options) * _SCALE  # type: ignore[call-overload]
    return tuple(prepared for _, prepared in equal_algorithms(_library_on(device), product, x, weight, 1))


# The library's handle of a device: it holds no state of a product but a workspace of 32 MiB for each stream.
@lru_cache(maxsize=16)
def _library_on(device: torch.device) -> CublasLt:
    return CublasLt(load_library(), device)
