"""Conversion of a request's fields into sampling parameters that the model can take."""

from collections.abc import Mapping

from server.errors import InvalidValue
from server.http.common.inputs import checked_ids
from server.http.generation.requests import GenerationRequest
from server.protocol.messages import SamplingParams
from server.text.sampling_defaults import SamplingDefaults
from server.text.tokenizer import Tokenizer


def sampling_of(
    fields: GenerationRequest, max_tokens: int, tokenizer: Tokenizer, defaults: SamplingDefaults, *, choice: int = 0
) -> SamplingParams:
    """Return the sampling of one of a prompt's choices: each has the seed after the one before it, if there is one.

    Raises InvalidValue for limits that depend on the model or on one another.
    """
    if fields.min_tokens > max_tokens:
        raise InvalidValue(f"min_tokens is {fields.min_tokens}, max_tokens allows {max_tokens}.", param="min_tokens")
    vocab_size, allowed = tokenizer.vocab_size, fields.allowed_token_ids
    stop_ids = checked_ids(fields.stop_token_ids, vocab_size, "stop_token_ids") if fields.stop_token_ids else []
    top_k = int(_first(fields.top_k, defaults.top_k, -1))
    top_p = _first(fields.top_p, defaults.top_p, 1.0)
    temperature = _first(fields.temperature, defaults.temperature, 1.0) if top_p else 0.0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=temperature,
        top_k=min(top_k, vocab_size) if top_k > 0 else None,
        top_p=top_p or 1.0,
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        seed=None if fields.seed is None else (fields.seed + choice + 2**63) % 2**64 - 2**63,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=fields.ignore_eos,
        logprobs=fields.num_likeliest,
        prompt_logprobs=fields.num_prompt_likeliest,
        logit_bias=_biases(fields.logit_bias, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(checked_ids(allowed, vocab_size, "allowed_token_ids")))
        if allowed
        else (),
        bad_words=_words(fields.bad_words, tokenizer) if fields.bad_words else (),
    )


def _words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, alone and behind a space where these do not end with those alone. Raises InvalidValue.

    VLLM leaves those behind a space out where they are more or fewer, and so bans "cat" as two tokens and no " cat".
    """
    found = []
    for word in words:
        alone, behind = (tokenizer.encode(text + word.lstrip(), add_special_tokens=False) for text in ("", " "))
        if not alone:
            raise InvalidValue("bad_words must have a character other than spaces each.", param="bad_words")
        found.append(tuple(alone))
        if behind[-len(alone) :] != alone:
            found.append(tuple(behind))
    return tuple(dict.fromkeys(found))


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits. Raises InvalidValue for a name that is no id of the vocabulary."""
    found = []
    for name, bias in logit_bias.items():
        is_id = name.isascii() and name.isdecimal() and len(name) < 20 and str(int(name)) == name
        if not is_id or int(name) >= vocab_size:
            wanted = f"token ids of 0 to {vocab_size - 1} as names"
            raise InvalidValue(f"logit_bias must have {wanted}, got another one.", param="logit_bias")
        found.append((int(name), float(bias)))
    return tuple(found)


def _first(asked: float | None, recommended: float | None, otherwise: float) -> float:
    """Return the request's own value, else the one that the model's authors recommend, else OpenAI's default."""
    return asked if asked is not None else recommended if recommended is not None else otherwise
