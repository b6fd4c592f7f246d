"""The library's face: attention over packed or paged tensors by the best kernel path, or by the one you name."""

import math
from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.prepared import Prepare, PreparedCall
from kernels.catalog import PATHS, path_named
from kernels.system.device import dtype_of, read_fingerprint
from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.path import KernelPath, Rejection, RunAttention
from kernels.vocabulary.shape import AttentionShape, Mask, Phase

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
    return _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k,
        (False, softmax_scale, causal, window, softcap), sinks, spans, path, out,
    )  # fmt: skip


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
    return _attend(
        q, k_pages, v_pages, cu_seqlens_q, page_table, context_lens, max_seqlen_q, max_context,
        (True, softmax_scale, causal, window, softcap), sinks, spans, path, out,
    )  # fmt: skip


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


class KnownCall:
    """Calls of one form: their arguments are valid, and this path computes them.

    prepare      makes launches of such calls; None where the path's `run` makes them each time
    max_context  what the page table can name
    prepared     launches by the addresses modulo 16 (0: all of them); empty where `prepare` made none
    """

    __slots__ = ("max_context", "prepare", "prepared", "run")

    def __init__(self, run: RunAttention, prepare: Prepare | None, max_context: float) -> None:
        self.run, self.prepare, self.max_context = run, prepare, max_context
        self.prepared: dict[int | tuple[int | None, ...], tuple[PreparedCall, ...]] = {}


# Forms of calls that were seen, with no tensor. All checks and the choice of a path take 120 us, the form of a call
# that is known 2.5 (one core of a Xeon).
known_calls: dict[tuple[object, ...], KnownCall] = {}
MAX_KNOWN_CALLS = 512
MAX_PREPARED_CALLS = 4  # of a form and places of its tensors: bounds of the contexts can ask for several

# Whether keys are in pages, the scale, causal, the window and the softcap, as they are given.
_Options = tuple[bool, float | None, bool, int | None, float | None]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    keys: Tensor,
    lengths: Tensor | None,
    max_queries: int,
    max_context: int,
    options: _Options,
    sinks: Tensor | None,
    spans: Tensor | None,
    path: str | None,
    out: Tensor | None,
) -> Tensor:
    """Launch a call as it was prepared; check one of a form that is not known, and run it.

    starts: cu_seqlens_q; keys: cu_seqlens_k or the page table. Not by name, which would take longer.
    """
    # All that checks, choice and launches look at besides addresses, and of the bound of the contexts its bucket.
    # A contiguous tensor may have any stride in a dim of one: nothing is found by it.
    form = (
        q.shape, q.is_contiguous() or q.stride(), q.dtype, q.device,
        k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device,
        v.shape, v.is_contiguous() or v.stride(), v.dtype, v.device,
        starts.shape, starts.is_contiguous(), starts.dtype, starts.device,
        None if keys is None else keys is starts or (keys.shape, keys.is_contiguous(), keys.dtype, keys.device),
        None if lengths is None else (lengths.shape, lengths.is_contiguous(), lengths.dtype, lengths.device),
        max_queries, bisect_left(_BUCKET_ENDS, max_context), options,
        None if sinks is None else (sinks.shape, sinks.is_contiguous(), sinks.dtype, sinks.device),
        None if spans is None else (spans.shape, spans.is_contiguous(), spans.dtype, spans.device),
        path, None if out is None else (out.shape, out.is_contiguous() or out.stride(), out.dtype, out.device),
    )  # fmt: skip
    known = known_calls.get(form)
    if out is None:
        out = torch.empty_like(q)
    places: int | tuple[int | None, ...] = 0
    if known is not None and known.prepare is not None:
        q_at, k_at, v_at, starts_at, keys_at = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(), keys.data_ptr()
        )  # fmt: skip
        lengths_at = None if lengths is None else lengths.data_ptr()
        sinks_at = None if sinks is None else sinks.data_ptr()
        spans_at = None if spans is None else spans.data_ptr()
        addresses = (q_at, k_at, v_at, starts_at, keys_at, lengths_at, sinks_at, spans_at, out.data_ptr())
        some = q_at | k_at | v_at | starts_at | keys_at | (lengths_at or 0) | (sinks_at or 0) | (spans_at or 0)
        if (some | addresses[-1]) % 16:
            places = tuple(None if at is None else at % 16 for at in addresses)
        for call in known.prepared.get(places, ()):
            if call.min_context <= max_context <= call.max_context:
                call.launch(starts, *addresses)
                return out
    is_paged, scale, causal, window, softcap = options
    flags = _flags(q, scale, causal, window, softcap, sinks, spans)
    if is_paged:
        batch = AttentionBatch(starts, max_queries, max_context, page_table=keys, context_lens=lengths)
    else:
        batch = AttentionBatch(starts, max_queries, max_context, cu_seqlens_k=keys)
    if known is None or not 0 <= max_context <= known.max_context:
        known = _check_call(q, k, v, batch, flags, path=path, out=out)
        _remember(form, known)
    elif known.prepare is not None and known.prepared.get(places) != ():  # the second call of a form
        _prepare(known, places, known.prepare(q, k, v, batch, flags, out))
    if q.shape[0] > 0:
        known.run(q, k, v, batch, flags, out)
    return out


def _remember(form: tuple[object, ...], known: KnownCall) -> None:
    if len(known_calls) >= MAX_KNOWN_CALLS:
        known_calls.clear()
    known_calls[form] = known


def _prepare(known: KnownCall, places: int | tuple[int | None, ...], call: PreparedCall | None) -> None:
    """Keep launches for the calls that come, but none for a bound that must be refused."""
    if places not in known.prepared and len(known.prepared) >= MAX_PREPARED_CALLS:
        known.prepared.clear()
    if call is None:
        known.prepared[places] = ()
        return
    allowed = call._replace(min_context=max(call.min_context, 0), max_context=min(call.max_context, known.max_context))
    known.prepared[places] = (allowed, *known.prepared.get(places, ())[: MAX_PREPARED_CALLS - 1])


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


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    path: str | None,
    out: Tensor,
) -> KnownCall:
    """Raises ShapeError."""
    _check_tensors(q, k, v, batch, out)
    _check_lengths(q, k, batch)
    _check_flags(q, flags)
    chosen = _choose(q, k, batch, flags, path)
    assert chosen.run is not None, "a path that cannot be imported rejects every shape"
    table = batch.page_table
    has_keys = batch.cu_seqlens_k is not None if table is None else batch.context_lens is not None
    prepare = chosen.prepare if has_keys and q.shape[0] > 0 else None
    return KnownCall(chosen.run, prepare, math.inf if table is None else table.shape[1] * k.shape[1])


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
