"""The peers of our paths: FlashAttention 2 and cuDNN in PyTorch's SDPA, FlexAttention, FlashAttention 3.

SDPA and FlexAttention get the dense [seqs, heads, tokens, head_dim] tensors that they are made for, laid out before the
clock starts. What a peer cannot compute, or why it is not here, is a sentence, never a slower way of the same name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.attention.inputs import Inputs, dense
from kernels.vocabulary.shape import Phase

Call = Callable[[], Tensor]  # computes and returns the output in the peer's own form


class Unavailable(Exception):
    """A peer cannot compute a case; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A contender that has its inputs in its own form.

    packed           the output of `call` as [tokens, heads, head_dim]
    is_preallocated  `call` writes into the same output every time
    """

    call: Call
    packed: Callable[[Tensor], Tensor]
    is_preallocated: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """`prepare` raises Unavailable. A `call` may raise whatever its library raises."""

    name: str
    version: str
    prepare: Callable[[Inputs], Prepared]


def torch_peers(device: torch.device) -> list[Peer]:
    """The peers that come with PyTorch on this device."""
    version = f"torch {torch.__version__}"
    if device.type == "cpu":
        return [Peer("cpu-flash", version, lambda inputs: _prepare_sdpa(inputs, SDPBackend.FLASH_ATTENTION))]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return [
        Peer("fa2", version, lambda inputs: _prepare_sdpa(inputs, SDPBackend.FLASH_ATTENTION)),
        Peer("cudnn", f"cuDNN {cudnn}, {version}", lambda inputs: _prepare_sdpa(inputs, SDPBackend.CUDNN_ATTENTION)),
        Peer("flex", version, _prepare_flex),
    ]


def _check_dense(inputs: Inputs) -> None:
    if not inputs.case.is_equal_lengths:
        raise Unavailable("dense tensors hold sequences of one length only")


def _prepare_sdpa(inputs: Inputs, backend: SDPBackend) -> Prepared:
    """SDPA pinned to a backend, its causal mask its own. Raises Unavailable."""
    _check_dense(inputs)
    flags, phase = inputs.flags, inputs.case.shape.phase
    for name, value in (("window", flags.window), ("softcap", flags.softcap), ("sinks", flags.sinks)):
        if value is not None:
            raise Unavailable(f"SDPA has no word for a {name} but a mask of every score")
    is_behind = phase is Phase.EXTEND or (phase is Phase.DECODE and max(inputs.case.queries) > 1)
    if is_behind and (backend is SDPBackend.CUDNN_ATTENTION or inputs.q.device.type == "cpu"):
        raise Unavailable("its causal mask is square: it takes no chunk after a context")
    q, k, v = dense(inputs)
    if phase is Phase.DECODE and not is_behind:
        # One query sees every key, so the query heads of a KV head can be the rows of one matrix: keys are read once.
        rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])

        def decode() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(rows, k, v, scale=flags.scale)

        return Prepared(decode, lambda output: output.reshape(inputs.q.shape))

    mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if is_behind else None

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=flags.scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return Prepared(attend, lambda output: output.transpose(1, 2).reshape(inputs.q.shape))


def _prepare_flex(inputs: Inputs) -> Prepared:
    """FlexAttention, compiled for this case alone: nothing of it may fall back to eager code. Raises Unavailable."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # seconds to import

    _check_dense(inputs)
    flags = inputs.flags
    if flags.sinks is not None:
        raise Unavailable("FlexAttention has no word for sinks")
    q, k, v = dense(inputs)
    num_queries, num_keys = q.shape[2], k.shape[2]
    first = num_keys - num_queries
    window, softcap = flags.window, flags.softcap

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        causal = key <= query + first
        return causal if window is None else causal & (key > query + first - window)

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    torch._dynamo.reset()  # else the ninth shape would be refused
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = create_block_mask(seen, None, None, num_queries, num_keys, device=q.device)

    def call() -> Tensor:
        output = compiled(
            q,
            k,
            v,
            score_mod=None if softcap is None else capped,
            block_mask=mask,
            scale=flags.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(output, Tensor)
        return output

    return Prepared(call, lambda output: output.transpose(1, 2).reshape(inputs.q.shape))
