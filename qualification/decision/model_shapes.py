"""What a model asks of attention, read from its config.json, and every shape that serving it can meet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernels.buckets import Bucket, buckets_up_to
from kernels.shape import AttentionShape, Dtype, Mask, Phase

# Where config.json does not say, as transformers' configuration classes have it; null means no window.
_MISSING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
# Gemma's files leave out what their classes know; head_dim is not hidden_size / num_attention_heads in any of them.
_LEFT_OUT: Mapping[str, Mapping[str, object]] = {
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
_QWEN_FIRST_LAYER = 28
_GEMMA3_PATTERN = 6  # one full layer after five with a window. Source: transformers' Gemma3TextConfig.


class SignatureError(ValueError):
    """config.json lacks a key, or holds a value that makes no attention."""


@dataclass(frozen=True, slots=True)
class AttentionSignature:
    """A model's attention, all layers together: two models of one signature need the same proofs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)  # distinct; None (no window) first, then ascending
    softcap: float | None = None
    sinks: bool = False
    spans: bool = False  # prompts may hold images, whose tokens see each other both ways

    def __str__(self) -> str:
        """One word, usable as a file name and unique for every signature."""
        parts = [f"h{self.num_heads}-{self.num_kv_heads}", f"d{self.head_dim}"]
        if self.windows != (None,):
            parts.append("w" + "-".join("full" if window is None else str(window) for window in self.windows))
        if self.softcap is not None:
            parts.append(f"cap{self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.spans:
            parts.append("spans")
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The settings that bound what a batch can look like."""

    max_model_len: int  # tokens of prompt and completion
    max_num_batched_tokens: int  # new tokens of one step
    page_size: int  # tokens
    dtype: Dtype
    kv_dtype: Dtype


def distinct_windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The windows of all layers, each once, in the order that `AttentionSignature` keeps."""
    found = set(windows)
    full: tuple[int | None, ...] = (None,) if None in found else ()
    return full + tuple(sorted(window for window in found if window is not None))


def shapes_needed(signature: AttentionSignature, limits: ServingLimits) -> tuple[AttentionShape, ...]:
    """Every shape that a batch can have under these limits, prefill first, then extend, then decode.

    A query is at most min(max_model_len, max_num_batched_tokens) long, and no longer than its context, which is at
    most max_model_len long. The longest query and the longest context of a batch may be different sequences'. Where
    prompts may hold images, each shape of prefill and extend is needed with and without them; tokens that are decoded
    are text.
    """
    query_buckets = buckets_up_to(min(limits.max_model_len, limits.max_num_batched_tokens))
    context_buckets = buckets_up_to(limits.max_model_len)
    layouts: list[tuple[Phase, Bucket, Bucket]] = [(Phase.PREFILL, bucket, bucket) for bucket in query_buckets]
    layouts += [
        (Phase.EXTEND, query, context)
        for query in query_buckets
        for context in context_buckets
        if context.lo >= query.lo
    ]
    layouts += [(Phase.DECODE, Bucket.LE_128, context) for context in context_buckets]
    return tuple(
        AttentionShape(
            phase=phase,
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            num_heads=signature.num_heads,
            num_kv_heads=signature.num_kv_heads,
            head_dim=signature.head_dim,
            query_bucket=query,
            context_bucket=context,
            page_size=None if phase is Phase.PREFILL else limits.page_size,
            window=window,
            softcap=signature.softcap,
            sinks=signature.sinks,
            mask=mask,
        )
        for mask in (Mask.CAUSAL, *((Mask.SPANS,) if signature.spans else ()))
        for window in signature.windows
        for phase, query, context in layouts
        if mask is Mask.CAUSAL or phase is not Phase.DECODE
    )


def signature_from_config(config: Mapping[str, object]) -> AttentionSignature:
    """The signature of a Hugging Face config.json, already parsed.

    Reads Llama-like models, Qwen 2 and 3, Mistral, Gemma 2 and 3, Phi-3 and gpt-oss; of a model that also sees images,
    the part under `text_config`. Qwen's multimodal positions (M-RoPE) turn queries and keys before attention and do not
    reach it; Gemma 3's images change the mask. Raises SignatureError naming the key, what it holds and what it should.
    """
    spans = config.get("model_type") == "gemma3" and "vision_config" in config
    config = text_part(config)
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _optional_positive(config, "num_key_value_heads") or num_heads
    head_dim = _optional_positive(config, "head_dim") or _positive(config, "hidden_size") // num_heads
    if num_heads % num_kv_heads:
        raise SignatureError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    return AttentionSignature(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=distinct_windows(_layer_windows(config)),
        softcap=_softcap(config),
        sinks=config.get("model_type") == "gpt_oss",
        spans=spans,
    )


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Of a model that also sees images, what is under `text_config`; with what its class adds to the file."""
    text = config.get("text_config")
    found = text if isinstance(text, Mapping) else config
    return {**_LEFT_OUT.get(str(found.get("model_type")), {}), **found}


def _layer_windows(config: Mapping[str, object]) -> list[int | None]:
    """The window of each layer, by the rules of transformers' configuration classes."""
    num_layers = _positive(config, "num_hidden_layers")
    model_type = str(config.get("model_type", ""))
    is_given = "sliding_window" in config
    window = _optional_positive(config, "sliding_window") if is_given else _MISSING_WINDOW.get(model_type)
    # Qwen's classes default to no window even where sliding_window is set; Mistral's and Phi-3's have no such switch.
    is_off = model_type.startswith("qwen") and config.get("use_sliding_window") is not True
    if window is None or is_off:
        return [None] * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [window if kind == "sliding_attention" else None for kind in _known_kinds(kinds, num_layers)]
    return [window if _has_window(config, layer) else None for layer in range(num_layers)]


def _has_window(config: Mapping[str, object], layer: int) -> bool:
    """For a config.json written before `layer_types` existed."""
    model_type = str(config.get("model_type", ""))
    if model_type.startswith("qwen"):
        first = config.get("max_window_layers")
        return layer >= (first if isinstance(first, int) else _QWEN_FIRST_LAYER)
    if model_type.startswith("gemma3"):
        return (layer + 1) % (_optional_positive(config, "sliding_window_pattern") or _GEMMA3_PATTERN) != 0
    if model_type in {"gemma2", "gpt_oss"}:
        return layer % 2 == 0
    return True


def _known_kinds(kinds: list[object], num_layers: int) -> list[object]:
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise SignatureError(f"layer_types holds {', '.join(unknown)}; known are full_attention and sliding_attention")
    if len(kinds) != num_layers:
        raise SignatureError(f"layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
    return kinds


def _softcap(config: Mapping[str, object]) -> float | None:
    value = config.get("attn_logit_softcapping")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SignatureError(f"attn_logit_softcapping must be a positive number, got {value!r}")
    return float(value)


def _positive(config: Mapping[str, object], key: str) -> int:
    value = _optional_positive(config, key)
    if value is None:
        raise SignatureError(f"config.json has no {key}")
    return value


def _optional_positive(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SignatureError(f"{key} must be a positive whole number, got {value!r}")
    return value
