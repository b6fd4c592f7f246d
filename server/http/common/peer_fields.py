"""Fields of other servers and APIs that mean something here: under another name, or without a field."""

import difflib
from collections.abc import Collection, Mapping

# By the name there: names here, of which the first that the request has is meant. What is behind a dot is within it.
OTHER_FIELDS: Mapping[str, tuple[str, ...]] = {
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "frequencyPenalty": ("frequency_penalty",),
    "grammar": ("structured_outputs.grammar",),
    "inputs": ("prompt", "input"),
    "json_schema": ("structured_outputs.json", "output_config.format"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_new_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "min_new_tokens": ("min_tokens",),
    "n_predict": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "n_probs": ("logprobs",),
    "num_predict": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "presencePenalty": ("presence_penalty",),
    "reasoning": ("reasoning_effort", "output_config.effort"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": ("text.format", "output_config.format"),
    "rid": ("request_id",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "structured_outputs": ("output_config.format",),
    "system": ("instructions",),
    "texts": ("input", "documents"),
    "thinking": ("chat_template_kwargs.enable_thinking",),
}
_SENT_BESIDE = "send what it holds beside the other fields"
_NO_ADAPTERS = "adapters are not implemented"
WITHOUT_FIELD: Mapping[str, str] = {
    "extra_body": _SENT_BESIDE,
    "keep_alive": "the model stays loaded",
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "num_ctx": "the server has one limit, --max-model-len",
    "options": _SENT_BESIDE,
    "parameters": _SENT_BESIDE,
    "sampling_params": _SENT_BESIDE,
}
# Of whole requests that belong to another route.
OTHER_ROUTES: Mapping[str, str] = {
    "input": "it belongs to /v1/responses or /v1/embeddings",
    "messages": "it belongs to /v1/chat/completions or /v1/messages",
    "prompt": "it belongs to /v1/completions",
}


def advice(name: str, known: Collection[str]) -> str:
    """Return what stands here for a field that a request with the fields `known` does not have; empty for nothing."""
    for other in OTHER_FIELDS.get(name, ()):
        if other.partition(".")[0] in known:
            return f"; use {other}"
    reason = WITHOUT_FIELD.get(name) or OTHER_ROUTES.get(name)
    if reason is not None:
        return f": {reason}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
