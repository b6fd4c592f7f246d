"""FlashAttention 3 as a peer, wherever it can be had: its package, vLLM's, or vLLM's compiled library alone."""

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.attention.inputs import Inputs, repaged
from bench.attention.peers import Peer, Prepared, Unavailable
from kernels.vocabulary.shape import Dtype, Phase

# Inputs, the output to write into, sinks in its dtype -> the output.
_Attend = Callable[[Inputs, Tensor, Tensor | None], Tensor]


def find_fa3(library: Path | None) -> Peer | str:
    """The peer, or why there is none. Of `library`, the compiled `_vllm_fa3_C`, the raw operator is used."""
    if library is not None:
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            return f"{library}: {error}"
        digest = hashlib.sha256(library.read_bytes()).hexdigest()[:12]
        return _peer(f"_vllm_fa3_C, sha256 {digest}", _by_library)
    missing = []
    for name in ("flash_attn_interface", "vllm.vllm_flash_attn"):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{name}: {error}")
            continue
        version = f"{name} {_version_of(name)}"
        if name == "flash_attn_interface":
            return _peer(version, _by_package(module), is_preallocated=False, has_sinks=False)
        return _peer(version, _by_vllm(module))
    return "; ".join(missing)


def on_pages(peer: Peer, page_size: int) -> Peer:
    """The peer over pages of another size than a case's: it copies by TMA only those that are as long as its steps."""

    def prepare(inputs: Inputs) -> Prepared:
        if not inputs.batch.is_paged or inputs.case.shape.page_size == page_size:
            raise Unavailable(f"keys are in no pages, or in such of {page_size} tokens for every contender")
        return peer.prepare(repaged(inputs, page_size, seed=page_size))

    return Peer(f"{peer.name}-page{page_size}", peer.version, prepare)


def _version_of(module: str) -> str:
    package = importlib.import_module(module.partition(".")[0])
    return str(getattr(package, "__version__", "of an unknown version"))


def _peer(version: str, attend: _Attend, *, is_preallocated: bool = True, has_sinks: bool = True) -> Peer:
    def prepare(inputs: Inputs) -> Prepared:
        if inputs.q.device.type != "cuda":
            raise Unavailable("runs on CUDA devices only")
        if inputs.case.shape.dtype is Dtype.FP32:
            raise Unavailable("takes bf16 and fp16 only")
        if inputs.flags.sinks is not None and not has_sinks:
            raise Unavailable("this build takes no sinks")
        out = torch.empty_like(inputs.q)
        sinks = None if inputs.flags.sinks is None else inputs.flags.sinks.to(out.dtype)
        return Prepared(lambda: attend(inputs, out, sinks), lambda output: output, is_preallocated)

    return Peer("fa3", version, prepare)


def _num_splits(inputs: Inputs) -> int:
    """FA3's own heuristic (0) where keys may be split; packed prefill fills the GPU without."""
    return 1 if inputs.case.shape.phase is Phase.PREFILL else 0


def _common(inputs: Inputs) -> Mapping[str, Any]:
    """The arguments that both Python interfaces share."""
    window = inputs.flags.window
    return {
        "softmax_scale": inputs.flags.scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": inputs.flags.softcap or 0.0,
        "num_splits": _num_splits(inputs),
    }


def _by_package(module: Any) -> _Attend:
    """FlashAttention's own package; its output is new at every call."""

    def attend(inputs: Inputs, _out: Tensor, _sinks: Tensor | None) -> Tensor:
        batch = inputs.batch
        if batch.is_paged:
            output = module.flash_attn_with_kvcache(
                inputs.q,
                inputs.k,
                inputs.v,
                cache_seqlens=batch.context_lens,
                page_table=batch.page_table,
                cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                **_common(inputs),
            )
        else:
            output = module.flash_attn_varlen_func(
                inputs.q,
                inputs.k,
                inputs.v,
                batch.cu_seqlens_q,
                batch.cu_seqlens_k,
                batch.max_seqlen_q,
                batch.max_context,
                **_common(inputs),
            )
        found: Tensor = output[0] if isinstance(output, tuple) else output
        return found

    return attend


def _by_vllm(module: Any) -> _Attend:
    """Call vLLM's build through its own function."""

    def attend(inputs: Inputs, out: Tensor, sinks: Tensor | None) -> Tensor:
        batch = inputs.batch
        module.flash_attn_varlen_func(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            max_seqlen_q=batch.max_seqlen_q,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_k=batch.max_context,
            cu_seqlens_k=batch.cu_seqlens_k,
            seqused_k=batch.context_lens,
            block_table=batch.page_table,
            out=out,
            fa_version=3,
            s_aux=sinks,
            **_common(inputs),
        )
        return out

    return attend


def _by_library(inputs: Inputs, out: Tensor, sinks: Tensor | None) -> Tensor:
    """Call vLLM's operator, its arguments by position as vLLM 0.26 gives them."""
    batch, flags = inputs.batch, inputs.flags
    window = (-1, -1) if flags.window is None else (flags.window - 1, 0)
    torch.ops._vllm_fa3_C.fwd(
        *(inputs.q, inputs.k, inputs.v),
        *(None, None, None),  # new keys, new values, a second query
        out,
        *(batch.cu_seqlens_q, batch.cu_seqlens_k, None),  # the last: of new keys
        *(None, batch.context_lens),  # used lengths of queries, of keys
        *(batch.max_seqlen_q, batch.max_context),
        batch.page_table,
        *(None, None),  # batch indices, left padding
        *(None, None, None),  # rotary embedding
        *(None, None, None),  # scales of fp8
        *(flags.scale, True, *window),
        *(flags.softcap or 0.0, True),  # the last: interleaved rotary embedding
        *(None, _num_splits(inputs), None, 0),  # schedule, splits, packing of query heads, spared multiprocessors
        sinks,
        *(1, 0, None),  # context parallelism: ranks, rank, lengths
    )
    return out
