"""The library's face: attention over packed or paged tensors by the best kernel path, or by the one you name."""

import math
from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.buckets import Bucket, bucket_of
from kernels.catalog import PATHS, path_named
from kernels.device import dtype_of, read_fingerprint
from kernels.path import KernelPath, Rejection, RunAttention
from kernels.shape import AttentionShape, Mask, Phase

_BUCKET_ENDS = tuple(bucket.hi for bucket in Bucket if bucket.hi is not None)
_ROWS_OF_A_TILE = 16  # query tokens x heads of a group, in decode


class ShapeError(ValueError):
    """Arguments that disagree; raised before any launch, naming what was expected and what was found."""


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    path: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed sequences of any lengths; a sequence's queries are the last of its positions.

    q                       [tokens, heads, head_dim] fp32, fp16 or bf16
    k, v                    [key tokens, kv_heads, head_dim] of the same dtype; kv_heads divides heads
    cu_seqlens_q, _k        [sequences + 1] int32 on the device, from 0 to tokens and to key tokens
    max_seqlen_q, _k        bounds of the lengths, known to the host
    softmax_scale           head_dim ** -0.5 if None
    window                  a query sees the `window` latest keys, itself included (with causal only)
    softcap                 scores become softcap * tanh(score / softcap)
    sinks                   [heads] fp32: a logit a head that joins the denominator
    spans                   [tokens, 2] int32: positions [lo, hi) a query sees beside the causal ones
    path                    a name of the catalog; None for the first that does not reject
    Returns `out`, or a new tensor like q. Raises ShapeError when arguments disagree or the path cannot serve them.
    """
    flags = _flags(q, softmax_scale, causal, window, softcap, sinks, spans)
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k=cu_seqlens_k)
    return _attend(q, k, v, batch, flags, path=path, out=out)


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_context: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    path: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over paged keys, the new tokens' own already in their pages; max_seqlen_q = 1 is decode.

    A few tokens a sequence (up to a path's `max_queries`) are decode too for a path that takes so many.
    k_pages, v_pages        [num_pages, page_size, kv_heads, head_dim]; slots past a context may hold anything
    page_table              [sequences, max_pages] int32; entries past a sequence's last page may hold anything
    context_lens            [sequences] int32, new tokens included
    cu_seqlens_q            [sequences + 1] int32
    max_context             bound of the contexts, known to the host, at most max_pages * page_size
    The rest is as in `attention_varlen`.
    """
    flags = _flags(q, softmax_scale, causal, window, softcap, sinks, spans)
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_context, page_table=page_table, context_lens=context_lens)
    return _attend(q, k_pages, v_pages, batch, flags, path=path, out=out)


def candidates(
    q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags
) -> tuple[tuple[KernelPath, tuple[Rejection, ...]], ...]:
    """Every path in the order of preference, with its reasons against these arguments; none means it can serve them."""
    fingerprint = read_fingerprint(q.device)
    return tuple((path, path.rejects(shape, fingerprint)) for path, shape in _asked(q, k, batch, flags))


def shape_of(q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags) -> AttentionShape:
    """The attention shape of a batch, by its host bounds."""
    if not batch.is_paged:
        phase = Phase.PREFILL
    else:
        phase = Phase.DECODE if batch.max_seqlen_q <= 1 else Phase.EXTEND
    if not flags.causal:
        mask = Mask.FULL
    else:
        mask = Mask.SPANS if flags.spans is not None else Mask.CAUSAL
    return AttentionShape(
        phase=phase,
        dtype=dtype_of(q.dtype),
        kv_dtype=dtype_of(k.dtype),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[2],
        query_bucket=bucket_of(max(1, batch.max_seqlen_q)),
        context_bucket=bucket_of(max(1, batch.max_context)),
        page_size=k.shape[1] if batch.is_paged else None,
        window=flags.window,
        softcap=flags.softcap,
        sinks=flags.sinks is not None,
        mask=mask,
    )


def _asked(
    q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags
) -> tuple[tuple[KernelPath, AttentionShape], ...]:
    """The paths in the order of preference, each with the shape that it is asked for.

    A few query tokens a sequence, as when drafted ones are verified, are decode for the paths that take so many. These
    come first where the rows of a KV head fill one tile of theirs; where they fill two, keys would be read twice.
    """
    shape = shape_of(q, k, batch, flags)
    if shape.phase is not Phase.EXTEND:
        return tuple((path, shape) for path in PATHS)
    few = replace(shape, phase=Phase.DECODE)
    asked = [(path, few if path.max_queries >= batch.max_seqlen_q else shape) for path in PATHS]
    if batch.max_seqlen_q * (shape.num_heads // shape.num_kv_heads) <= _ROWS_OF_A_TILE:
        asked.sort(key=lambda pair: pair[1] is shape)
    return tuple(asked)


def _flags(
    q: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    spans: Tensor | None,
) -> AttentionFlags:
    _check("q", "3 dims [tokens, heads, head_dim]", q.dim() == 3, tuple(q.shape))
    return AttentionFlags(q.shape[2] ** -0.5 if scale is None else scale, causal, window, softcap, sinks, spans)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    path: str | None,
    out: Tensor | None,
) -> Tensor:
    key = _form_of_call(q, k, v, batch, flags, path, out)
    known = _checked.get(key)
    if out is None:
        out = torch.empty_like(q)
    if known is None or not 0 <= batch.max_context <= known.max_context:
        known = _check_call(q, k, v, batch, flags, path=path, out=out)
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        _checked[key] = known
    if q.shape[0] > 0:
        known.run(q, k, v, batch, flags, out)
    return out


class _Checked(NamedTuple):
    """The result of checking calls of one form: their arguments are valid, and this path computes them."""

    run: RunAttention
    max_context: float  # what the page table can name


# Forms of calls that were checked. All checks and the choice of a path take 120 us, the form 6 (one core of a Xeon).
_checked: dict[tuple[object, ...], _Checked] = {}
_MAX_CHECKED = 512


def _form_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    path: str | None,
    out: Tensor | None,
) -> tuple[object, ...]:
    """All that checks and choice look at, but for the bound of the contexts, of which it holds the bucket."""
    starts, table, lengths = batch.cu_seqlens_k, batch.page_table, batch.context_lens
    sinks, spans = flags.sinks, flags.spans
    return (
        *_form(q), *_form(k), *_form(v), *_form(batch.cu_seqlens_q),
        None if starts is None else _form(starts),
        None if table is None or lengths is None else (*_form(table), *_form(lengths)),
        batch.max_seqlen_q, bisect_left(_BUCKET_ENDS, batch.max_context),
        flags.scale, flags.causal, flags.window, flags.softcap,
        None if sinks is None else _form(sinks), None if spans is None else _form(spans),
        path, None if out is None else _form(out),
    )  # fmt: skip


def _form(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    path: str | None,
    out: Tensor,
) -> _Checked:
    """Raises ShapeError."""
    _check_tensors(q, k, v, batch, out)
    _check_lengths(q, k, batch)
    _check_flags(q, flags)
    chosen = _choose(q, k, batch, flags, path)
    assert chosen.run is not None, "a path that cannot be imported rejects every shape"
    table = batch.page_table
    return _Checked(chosen.run, math.inf if table is None else table.shape[1] * k.shape[1])


def _choose(q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags, name: str | None) -> KernelPath:
    fingerprint = read_fingerprint(q.device)
    named = None if name is None else path_named(name)
    for path, shape in _asked(q, k, batch, flags):
        if named not in (None, path):
            continue
        rejections = path.rejects(shape, fingerprint)
        if not rejections:
            return path
        if name is not None:
            reasons = "; ".join(f"{rejection.code.value}: {rejection.detail}" for rejection in rejections)
            raise ShapeError(f"path {name} cannot serve {shape}: {reasons}")
    raise ShapeError(f"no path can serve {shape_of(q, k, batch, flags)} on {fingerprint}")


def _check(name: str, expected: str, holds: bool, found: object) -> None:
    if not holds:
        raise ShapeError(f"{name}: expected {expected}, found {found}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, out: Tensor) -> None:
    """Dims, dtypes, devices and strides of q, k, v and out."""
    _check("q", "cpu or cuda", q.device.type in ("cpu", "cuda"), q.device)
    _check("q", "fp32, fp16 or bf16", q.dtype in (torch.float32, torch.float16, torch.bfloat16), q.dtype)
    layout = "[num_pages, page_size, kv_heads, head_dim]" if batch.is_paged else "[tokens, kv_heads, head_dim]"
    num_dims = 4 if batch.is_paged else 3
    for name, tensor in (("k", k), ("v", v)):
        _check(name, f"{num_dims} dims {layout}", tensor.dim() == num_dims, tuple(tensor.shape))
        _check(name, f"head_dim {q.shape[2]} as q", tensor.shape[-1] == q.shape[2], tensor.shape[-1])
    _check("v", f"shape {tuple(k.shape)} as k", v.shape == k.shape, tuple(v.shape))
    num_heads, num_kv_heads = q.shape[1], k.shape[-2]
    divides = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    _check("k", f"a number of heads that divides q's {num_heads}", divides, num_kv_heads)
    _check("out", f"shape {tuple(q.shape)} as q", out.shape == q.shape, tuple(out.shape))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        _check(name, f"{q.dtype} as q", tensor.dtype == q.dtype, tensor.dtype)
        _check(name, f"device {q.device} as q", tensor.device == q.device, tensor.device)
        is_contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
        _check(name, "a last dim of stride 1", is_contiguous, f"strides {tensor.stride()}")


def _check_lengths(q: Tensor, k: Tensor, batch: AttentionBatch) -> None:
    """The tensors and bounds that say where sequences are. Their values stay on the device, unread."""
    _check_index("cu_seqlens_q", batch.cu_seqlens_q, q.device, num_dims=1)
    _check("cu_seqlens_q", "at least one element", batch.cu_seqlens_q.numel() > 0, 0)
    num_seqs = batch.num_seqs
    _check("max_seqlen_q", "at least 0", batch.max_seqlen_q >= 0, batch.max_seqlen_q)
    _check("the bound of the contexts", "at least 0", batch.max_context >= 0, batch.max_context)
    _check(
        "q", f"at most {num_seqs} x {batch.max_seqlen_q} rows", q.shape[0] <= num_seqs * batch.max_seqlen_q, q.shape[0]
    )
    if batch.cu_seqlens_k is not None:
        _check_index("cu_seqlens_k", batch.cu_seqlens_k, q.device, num_dims=1)
        counts = batch.cu_seqlens_k.numel()
        _check("cu_seqlens_k", f"{num_seqs + 1} elements as cu_seqlens_q", counts == num_seqs + 1, counts)
    if batch.page_table is not None and batch.context_lens is not None:
        _check_index("page_table", batch.page_table, q.device, num_dims=2)
        _check_index("context_lens", batch.context_lens, q.device, num_dims=1)
        rows, max_pages = batch.page_table.shape
        _check("page_table", f"{num_seqs} rows, one a sequence", rows == num_seqs, rows)
        _check(
            "context_lens", f"{num_seqs} elements", batch.context_lens.numel() == num_seqs, batch.context_lens.numel()
        )
        capacity = max_pages * k.shape[1]
        fits = batch.max_context <= capacity
        _check("max_context", f"at most {capacity}, what the page table can name", fits, batch.max_context)


def _check_index(name: str, tensor: Tensor, device: torch.device, *, num_dims: int) -> None:
    _check(name, "int32", tensor.dtype == torch.int32, tensor.dtype)
    _check(name, f"{num_dims} dims", tensor.dim() == num_dims, tuple(tensor.shape))
    _check(name, f"device {device} as q", tensor.device == device, tensor.device)
    _check(name, "contiguous", tensor.is_contiguous(), f"strides {tensor.stride()}")


def _check_flags(q: Tensor, flags: AttentionFlags) -> None:
    _check("softmax_scale", "positive and finite", 0 < flags.scale < math.inf, flags.scale)
    if flags.window is not None:
        _check("window", "at least 1", flags.window >= 1, flags.window)
        _check("window", "causal attention beside it", flags.causal, "causal=False")
    if flags.softcap is not None:
        _check("softcap", "positive and finite", 0 < flags.softcap < math.inf, flags.softcap)
    if flags.sinks is not None:
        _check(
            "sinks", f"shape ({q.shape[1]},), one a head", flags.sinks.shape == (q.shape[1],), tuple(flags.sinks.shape)
        )
        _check("sinks", "fp32", flags.sinks.dtype == torch.float32, flags.sinks.dtype)
        _check("sinks", f"device {q.device} as q", flags.sinks.device == q.device, flags.sinks.device)
        _check("sinks", "contiguous", flags.sinks.is_contiguous(), f"strides {flags.sinks.stride()}")
    if flags.spans is not None:
        _check("spans", "causal attention beside them", flags.causal, "causal=False")
        _check_index("spans", flags.spans, q.device, num_dims=2)
        _check("spans", f"shape ({q.shape[0]}, 2)", flags.spans.shape == (q.shape[0], 2), tuple(flags.spans.shape))
