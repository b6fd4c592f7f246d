"""Products of one order of sums on an sm_90 GPU: each row has the bits that it has alone."""

import pytest
import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.library.cublaslt import CublasLt, load_library
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.linear.ordered.autotune import measure_in_order
from kernels.linear.ordered.library_path import RunMeasuredInOrder, RunProposedInOrder
from kernels.linear.paths import LINEAR_PATHS, RunLinear
from kernels.linear.weights import PlainWeight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]
GPU = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
FEW = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64)
MANY = (65, 96, 128, 129, 256, 257, 600, 1025)
PATHS = {path.name: path for path in LINEAR_PATHS if path.name.endswith(".ordered")}


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)
    torch.cuda.synchronize()  # a weight must not come from the launch right before
    return made


def unequal(run: RunLinear, reference: RunLinear, sizes: tuple[int, int], epilogue: Epilogue, bias: bool) -> list[int]:
    """Return the numbers of rows whose bits are not those of each row alone, computed by `reference`."""
    size_out, size_in = sizes
    weight = PlainWeight(randn(epilogue.parts * size_out, size_in, seed=1))
    added = randn(size_out, seed=2) if bias else None
    x = randn(max(MANY) + 3, size_in)
    dtype = torch.float32 if epilogue is Epilogue.FP32 else BF16
    alone = torch.empty(x.shape[0], size_out, dtype=dtype, device=GPU)
    for row in range(x.shape[0]):
        reference(x[row : row + 1], weight, added, epilogue, alone[row : row + 1])
    found = []
    for count in MANY if isinstance(run, RunProposedInOrder | RunMeasuredInOrder) else FEW + MANY:
        out = torch.full((count, size_out), torch.nan, dtype=dtype, device=GPU)
        run(x[3 : 3 + count].contiguous(), weight, added, epilogue, out)
        if not torch.equal(out.view(torch.uint8), alone[3 : 3 + count].view(torch.uint8)):
            found.append(count)
    return found


@pytest.mark.parametrize("sizes", [(4096, 1024), (5120, 2048), (1000, 1000), (24, 72), (333, 520)])
@pytest.mark.parametrize(("epilogue", "bias"), [(it, False) for it in Epilogue] + [(Epilogue.NONE, True)])
def test_a_row_has_the_bits_it_has_alone(sizes: tuple[int, int], epilogue: Epilogue, bias: bool) -> None:
    own = PATHS["gluon.linear.ordered"].run
    assert own is not None
    if epilogue is Epilogue.SWIGLU and sizes[0] % 8:
        pytest.skip("a SwiGLU takes multiples of 8 results")
    assert unequal(own, own, sizes, epilogue, bias) == []
    if sizes[0] % 8:
        return
    for run in RunProposedInOrder().variants[:6]:
        assert unequal(run, own, sizes, epilogue, bias) == [], run


@pytest.mark.parametrize("sizes", [(128, 2048), (2048, 4096), (1024, 928), (8, 32)])
@pytest.mark.parametrize(("epilogue", "bias"), [(Epilogue.NONE, True), (Epilogue.FP32, False)])
def test_small_weights_have_one_order_too(sizes: tuple[int, int], epilogue: Epilogue, bias: bool) -> None:
    run = PATHS["gluon.linear.small.ordered"].run
    assert run is not None
    assert unequal(run, run, sizes, epilogue, bias) == []


def test_measured_algorithms_have_the_bits_of_our_own_kernel() -> None:
    own, weight = PATHS["gluon.linear.ordered"].run, randn(6144, 4096, seed=1)
    assert own is not None
    library = CublasLt(load_library(), GPU)
    choices = measure_in_order(library, [weight], BF16, [80, 128, 512, 1152])
    run = RunMeasuredInOrder(MatmulFallbacks().note)
    run.choose(library, {(6144, 4096, BF16, BF16): choices})
    assert unequal(run, own, (6144, 4096), Epilogue.NONE, bias=False) == []
