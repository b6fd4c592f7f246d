"""The library's face: attention over packed or paged tensors by the best kernel path, or by the one you name.

Calls over the same lengths, as those of a model's layers, share a plan:

    plan = plan_paged(page_table, context_lens, cu_seqlens_q, max_seqlen_q=1, max_context=4096)
    for layer in layers:
        out = plan.run(layer.q, layer.k_pages, layer.v_pages, sinks=layer.sinks)
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.arguments import BatchForm, CallForm, ShapeError, TensorForm, check, check_call, form_of
from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.plan import plan
from kernels.catalog import PATHS, path_named
from kernels.system.device import dtype_of, read_fingerprint
from kernels.vocabulary.buckets import bucket_of
from kernels.vocabulary.path import KernelPath, Rejection, RunAttention
from kernels.vocabulary.preference import asked_for
from kernels.vocabulary.shape import AttentionShape, Mask, Phase

__all__ = [
    "AttentionPlan", "ShapeError", "attention_paged", "attention_varlen", "candidates", "plan_paged", "plan_varlen",
    "shape_of",
]  # fmt: skip

_MAX_LAUNCHES = 1024  # of a plan: one for each pair of addresses of queries and output, some KB each


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
    path                    a name of the catalog; None for the preferred one of those that do not reject
    Returns `out`, or a new tensor like q. Raises ShapeError when arguments disagree or the path cannot serve them.

    A call plans for itself. Layers of one batch, and repeated calls over the same lengths, share a plan: `plan_varlen`.
    """
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k=cu_seqlens_k)
    calls = _calls_over(batch, softmax_scale, causal, window, softcap, spans, path)
    return calls.run(q, k, v, sinks=sinks, out=out)


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
    The rest is as in `attention_varlen`; layers of one batch share a plan: `plan_paged`.
    """
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_context, page_table=page_table, context_lens=context_lens)
    calls = _calls_over(batch, softmax_scale, causal, window, softcap, spans, path)
    return calls.run(q, k_pages, v_pages, sinks=sinks, out=out)


def plan_varlen(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    spans: Tensor | None = None,
    path: str | None = None,
) -> "AttentionPlan":
    """Plan calls of `attention_varlen` over these lengths, with arguments as there. Raises ShapeError."""
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k=cu_seqlens_k)
    return _calls_over(plan(batch), softmax_scale, causal, window, softcap, spans, path)


def plan_paged(
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
    spans: Tensor | None = None,
    path: str | None = None,
) -> "AttentionPlan":
    """Plan calls of `attention_paged` over these lengths, with arguments as there. Raises ShapeError."""
    batch = AttentionBatch(cu_seqlens_q, max_seqlen_q, max_context, page_table=page_table, context_lens=context_lens)
    return _calls_over(plan(batch), softmax_scale, causal, window, softcap, spans, path)


class AttentionPlan:
    """The part that calls over one batch share: its layout, the path of each form of tensors, what that makes of it.

    A call with tensors like an earlier one's repeats the launches of that with its own addresses: it takes the host a
    third of a first call, or less. While the plan is used the tensors that it was made of must not change, and its
    calls come one after another on one stream. A CUDA graph has a plan of its own, made inside of its capture.
    """

    __slots__ = ("_batch", "_flags", "_form", "_served")

    def __init__(self, batch: AttentionBatch, flags: AttentionFlags, form: BatchForm) -> None:
        """flags, form: of all calls, but for the sinks, and for the scale where none is given."""
        self._batch, self._flags, self._form = batch, flags, form
        self._served: dict[tuple[object, ...], tuple[RunAttention, float]] = {}  # by form: a path's `run`, the scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Attention of one layer, with arguments as in `attention_varlen` or `attention_paged`.

        Returns `out`, or a new tensor like q. Raises ShapeError when arguments disagree or no path can serve them.
        """
        of_tensors = (
            form_of(q), form_of(k), form_of(v), None if sinks is None else form_of(sinks),
            None if out is None else form_of(out),
        )  # fmt: skip
        found = self._served.get(of_tensors)
        if found is None:
            found = self._served[of_tensors] = self._serving(CallForm(*of_tensors, self._form))
        run, scale = found
        flags = self._flags
        if flags.scale != scale or flags.sinks is not sinks:
            flags = AttentionFlags(scale, flags.causal, flags.window, flags.softcap, sinks, flags.spans)
            self._flags = flags
        if out is None:
            out = torch.empty_like(q)
        if q.shape[0] > 0:
            run(q, k, v, self._batch, flags, out)
            if self._batch.plans is not None and len(self._batch.plans) > _MAX_LAUNCHES:
                self._batch = plan(self._batch)
        return out

    def _serving(self, call: CallForm) -> tuple[RunAttention, float]:
        """Raises ShapeError."""
        path = _path_for(call)
        assert path.run is not None, "a path that cannot be imported rejects every shape"
        if call.batch.is_paged:
            capacity, bound = call.batch.keys[0][1] * call.k[0][1], self._batch.max_context
            check("max_context", f"at most {capacity}, what the page table can name", bound <= capacity, bound)
        scale = call.batch.scale
        return path.run, call.q[0][2] ** -0.5 if scale is None else scale


def candidates(
    q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags
) -> tuple[tuple[KernelPath, tuple[Rejection, ...]], ...]:
    """Every path in the order of preference, with its reasons against these arguments; none means it can serve them."""
    fingerprint = read_fingerprint(q.device)
    asked = asked_for(PATHS, shape_of(q, k, batch, flags), batch.max_seqlen_q)
    return tuple((path, path.rejects(shape, fingerprint)) for path, shape in asked)


def shape_of(q: Tensor, k: Tensor, batch: AttentionBatch, flags: AttentionFlags) -> AttentionShape:
    """The attention shape of a batch, by its host bounds."""
    spans, sinks = (None if x is None else form_of(x) for x in (flags.spans, flags.sinks))
    form = _batch_form(batch, flags.scale, flags.causal, flags.window, flags.softcap, spans, None)
    return _shape(CallForm(form_of(q), form_of(k), form_of(k), sinks, None, form))


def _calls_over(
    batch: AttentionBatch,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    spans: Tensor | None,
    path: str | None,
) -> AttentionPlan:
    """Return the calls over a batch. Without plans each of them plans for itself. Raises ShapeError."""
    check("the bound of the contexts", "at least 0", batch.max_context >= 0, batch.max_context)
    form = _batch_form(batch, scale, causal, window, softcap, None if spans is None else form_of(spans), path)
    # A scale that is not given is known with the queries' head dim.
    flags = AttentionFlags(0.0 if scale is None else scale, causal, window, softcap, None, spans)
    return AttentionPlan(batch, flags, form)


def _batch_form(
    batch: AttentionBatch,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    spans: TensorForm | None,
    path: str | None,
) -> BatchForm:
    keys, lengths = batch.cu_seqlens_k if batch.page_table is None else batch.page_table, batch.context_lens
    assert keys is not None, "a batch is either paged or packed"
    return BatchForm(
        form_of(batch.cu_seqlens_q), form_of(keys), None if lengths is None else form_of(lengths), batch.max_seqlen_q,
        bucket_of(max(1, batch.max_context)), scale, causal, window, softcap, spans, path,
    )  # fmt: skip


def _shape(call: CallForm) -> AttentionShape:
    (q, _, dtype, _), (k, _, kv_dtype, _), of = call.q, call.k, call.batch
    phase = (Phase.DECODE if of.max_seqlen_q <= 1 else Phase.EXTEND) if of.is_paged else Phase.PREFILL
    causal = Mask.CAUSAL if of.spans is None else Mask.SPANS
    return AttentionShape(
        phase=phase,
        dtype=dtype_of(dtype),
        kv_dtype=dtype_of(kv_dtype),
        num_heads=q[1],
        num_kv_heads=k[-2],
        head_dim=q[2],
        query_bucket=bucket_of(max(1, of.max_seqlen_q)),
        context_bucket=of.context,
        page_size=k[1] if of.is_paged else None,
        window=of.window,
        softcap=of.softcap,
        sinks=call.sinks is not None,
        mask=causal if of.causal else Mask.FULL,
    )


# A pure function of what is asked for: its cache holds no state, and no tensor. All checks and the choice of a path
# take 120 us, to find the path again 1 to 2 (one core of a Xeon).
@lru_cache(maxsize=512)
def _path_for(call: CallForm) -> KernelPath:
    """Raises ShapeError."""
    check_call(call)
    shape, fingerprint, name = _shape(call), read_fingerprint(call.q[3]), call.batch.path
    named = None if name is None else path_named(name)
    for path, asked in asked_for(PATHS, shape, call.batch.max_seqlen_q):
        if named not in (None, path):
            continue
        rejections = path.rejects(asked, fingerprint)
        if not rejections:
            return path
        if name is not None:
            reasons = "; ".join(f"{rejection.code.value}: {rejection.detail}" for rejection in rejections)
            raise ShapeError(f"path {name} cannot serve {asked}: {reasons}")
    raise ShapeError(f"no path can serve {shape} on {fingerprint}")
