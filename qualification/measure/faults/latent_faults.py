"""Kernels over pages of latents that must be refused: another part of a key, another scale, page or head is taken."""

from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask
from kernels.vocabulary.value_shape import Values, with_values
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.faults.attention_faults import Fault, trial_shapes, wrong_kernel
from qualification.measure.inputs.attention_inputs import cases


class LatentFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # must pass
    ROTATED_LEFT_OUT = "scores are of the latents alone"  # the second product of a tile is not added
    LATENT_LEFT_OUT = "scores are of the rotated numbers alone"
    SCALE_OF_LATENT = "scores are divided by the root of a latent's numbers"  # the scale given is not read
    SCALE_OF_KEY = "scores are divided by the root of all numbers of a key"  # head_dim of the shape
    LAST_NUMBERS = "values are a key's last numbers"  # the offset of the rotated part
    OTHER_PAGE = "the first page is that of another sequence"  # a row of the page table too far
    NEIGHBOUR_HEAD = "a head has the result of its neighbour"  # heads of one tile are stored in another order


def wrong_latent_kernel(fault: LatentFault) -> RunAttention:
    """Attention over latents with this fault. Not for service."""
    attend = wrong_kernel(Fault.NONE)

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        latent_dim = v.shape[-1]
        if fault in (LatentFault.ROTATED_LEFT_OUT, LatentFault.LATENT_LEFT_OUT):
            q = q.clone()
            left_out = slice(latent_dim, None) if fault is LatentFault.ROTATED_LEFT_OUT else slice(latent_dim)
            q[..., left_out] = 0
        elif fault is LatentFault.SCALE_OF_LATENT:
            flags = replace(flags, scale=latent_dim**-0.5)
        elif fault is LatentFault.SCALE_OF_KEY:
            flags = replace(flags, scale=k.shape[-1] ** -0.5)
        elif fault is LatentFault.LAST_NUMBERS:
            v = k[..., -latent_dim:]
        elif fault is LatentFault.OTHER_PAGE:
            batch = _of_other_pages(batch)
        attend(q, k, v, batch, flags, out)
        if fault is LatentFault.NEIGHBOUR_HEAD:
            out.copy_(out.roll(1, dims=1))

    return run


def _of_other_pages(batch: AttentionBatch) -> AttentionBatch:
    """Give each sequence with keys the first page of the one before it, whose numbers are real ones, too."""
    if batch.page_table is None or batch.context_lens is None:
        return batch
    table = batch.page_table.clone()
    rows = batch.context_lens.nonzero().flatten()
    table[rows, 0] = batch.page_table[rows.roll(1), 0]
    return replace(batch, page_table=table)


def trial_shapes_of_latents(dtype: Dtype) -> tuple[AttentionShape, ...]:
    """A shape of each phase, as small as shows every fault."""
    return tuple(
        with_values(
            replace(it, num_kv_heads=1, head_dim=80, window=None, softcap=None, sinks=False, mask=Mask.CAUSAL),
            Values(64, is_latent=True),
        )
        for it in trial_shapes(dtype)
    )


def can_show_in(fault: LatentFault, shape: AttentionShape) -> bool:
    """Return whether a kernel with this fault computes the shape wrongly."""
    return fault is not LatentFault.OTHER_PAGE or shape.page_size is not None


def latent_faults_passed_wrongly(
    dtypes: frozenset[Dtype], device: torch.device, *, seed: int = 0
) -> tuple[tuple[LatentFault, AttentionShape], ...]:
    """Try the checker on every fault, and on none. Empty when it refuses all that is wrong and passes what is right."""
    found = []
    with one_thread():
        for dtype in (dtype for dtype in Dtype if dtype in dtypes):
            for shape in trial_shapes_of_latents(dtype):
                inputs, references = list(cases(shape, device, seed=seed)), References()
                for fault in (it for it in LatentFault if can_show_in(it, shape)):
                    run = wrong_latent_kernel(fault)
                    passes = all(it.is_passed for case in inputs for it in check_path(run, [case], references))
                    if passes is not (fault is LatentFault.NONE):
                        found.append((fault, shape))
    return tuple(found)
