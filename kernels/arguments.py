"""Arguments of a library call, by their forms: all that is checked of them, and all that chooses a path."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.vocabulary.buckets import Bucket

# Shape, strides (None: contiguous, then a dim of one may have any), dtype and device.
TensorForm = tuple[torch.Size, tuple[int, ...] | None, torch.dtype, torch.device]


class ShapeError(ValueError):
    """Arguments that disagree; raised before any launch, naming what was expected and what was found."""


class BatchForm(NamedTuple):
    """The arguments of a call that its batch and its flags are made of.

    starts   cu_seqlens_q
    keys     cu_seqlens_k, or the page table
    lengths  context_lens; None: keys are packed
    context  of the bound of the contexts, which the batch checks itself
    scale    None: head_dim ** -0.5
    path     a name of the catalog, None for the preferred one
    """

    starts: TensorForm
    keys: TensorForm
    lengths: TensorForm | None
    max_seqlen_q: int
    context: Bucket
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    spans: TensorForm | None
    path: str | None

    @property
    def is_paged(self) -> bool:
        return self.lengths is not None


class CallForm(NamedTuple):
    """The arguments of a call. sinks, out: None where none are given."""

    q: TensorForm
    k: TensorForm
    v: TensorForm
    sinks: TensorForm | None
    out: TensorForm | None
    batch: BatchForm


def form_of(x: Tensor) -> TensorForm:
    return x.shape, None if x.is_contiguous() else x.stride(), x.dtype, x.device


def check_call(call: CallForm) -> None:
    """Raises ShapeError."""
    _check_tensors(call)
    _check_lengths(call)
    _check_flags(call)


def check(name: str, expected: str, holds: bool, found: object) -> None:
    """Raises ShapeError where it does not hold."""
    if not holds:
        raise ShapeError(f"{name}: expected {expected}, found {found}")


def _check_tensors(call: CallForm) -> None:
    """Dims, dtypes, devices and strides of q, k, v and out."""
    q, _, dtype, device = call.q
    check("q", "3 dims [tokens, heads, head_dim]", len(q) == 3, tuple(q))
    check("q", "cpu or cuda", device.type in ("cpu", "cuda"), device)
    check("q", "fp32, fp16 or bf16", dtype in (torch.float32, torch.float16, torch.bfloat16), dtype)
    is_paged = call.batch.is_paged
    layout = "[num_pages, page_size, kv_heads, head_dim]" if is_paged else "[tokens, kv_heads, head_dim]"
    num_dims = 4 if is_paged else 3
    k, v = call.k[0], call.v[0]
    for name, shape in (("k", k), ("v", v)):
        check(name, f"{num_dims} dims {layout}", len(shape) == num_dims, tuple(shape))
        check(name, f"head_dim {q[2]} as q", shape[-1] == q[2], shape[-1])
    check("v", f"shape {tuple(k)} as k", v == k, tuple(v))
    num_heads, num_kv_heads = q[1], k[-2]
    divides = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    check("k", f"a number of heads that divides q's {num_heads}", divides, num_kv_heads)
    if call.out is not None:
        check("out", f"shape {tuple(q)} as q", call.out[0] == q, tuple(call.out[0]))
    for name, form in (("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)):
        if form is None:
            continue
        shape, strides, of_dtype, of_device = form
        check(name, f"{dtype} as q", of_dtype == dtype, of_dtype)
        check(name, f"device {device} as q", of_device == device, of_device)
        is_contiguous = strides is None or strides[-1] == 1 or shape[-1] <= 1
        check(name, "a last dim of stride 1", is_contiguous, f"strides {strides}")


def _check_lengths(call: CallForm) -> None:
    """The tensors and bounds that say where sequences are. Their values stay on the device, unread."""
    batch, num_tokens, device = call.batch, call.q[0][0], call.q[3]
    _check_index("cu_seqlens_q", batch.starts, device, num_dims=1)
    counts = batch.starts[0].numel()
    check("cu_seqlens_q", "at least one element", counts > 0, 0)
    num_seqs, longest = counts - 1, batch.max_seqlen_q
    check("max_seqlen_q", "at least 0", longest >= 0, longest)
    check("q", f"at most {num_seqs} x {longest} rows", num_tokens <= num_seqs * longest, num_tokens)
    if batch.lengths is None:
        _check_index("cu_seqlens_k", batch.keys, device, num_dims=1)
        counts = batch.keys[0].numel()
        check("cu_seqlens_k", f"{num_seqs + 1} elements as cu_seqlens_q", counts == num_seqs + 1, counts)
        return
    _check_index("page_table", batch.keys, device, num_dims=2)
    _check_index("context_lens", batch.lengths, device, num_dims=1)
    rows, counts = batch.keys[0][0], batch.lengths[0].numel()
    check("page_table", f"{num_seqs} rows, one a sequence", rows == num_seqs, rows)
    check("context_lens", f"{num_seqs} elements", counts == num_seqs, counts)


def _check_index(name: str, form: TensorForm, device: torch.device, *, num_dims: int) -> None:
    shape, strides, dtype, of_device = form
    check(name, "int32", dtype == torch.int32, dtype)
    check(name, f"{num_dims} dims", len(shape) == num_dims, tuple(shape))
    check(name, f"device {device} as q", of_device == device, of_device)
    check(name, "contiguous", strides is None, f"strides {strides}")


def _check_flags(call: CallForm) -> None:
    batch, (num_tokens, num_heads, _), device = call.batch, call.q[0], call.q[3]
    if batch.scale is not None:
        check("softmax_scale", "positive and finite", 0 < batch.scale < math.inf, batch.scale)
    if batch.window is not None:
        check("window", "at least 1", batch.window >= 1, batch.window)
        check("window", "causal attention beside it", batch.causal, "causal=False")
    if batch.softcap is not None:
        check("softcap", "positive and finite", 0 < batch.softcap < math.inf, batch.softcap)
    if call.sinks is not None:
        shape, strides, dtype, of_device = call.sinks
        check("sinks", f"shape ({num_heads},), one a head", shape == (num_heads,), tuple(shape))
        check("sinks", "fp32", dtype == torch.float32, dtype)
        check("sinks", f"device {device} as q", of_device == device, of_device)
        check("sinks", "contiguous", strides is None, f"strides {strides}")
    if batch.spans is not None:
        check("spans", "causal attention beside them", batch.causal, "causal=False")
        _check_index("spans", batch.spans, device, num_dims=2)
        check("spans", f"shape ({num_tokens}, 2)", batch.spans[0] == (num_tokens, 2), tuple(batch.spans[0]))
