"""Token ids of prompts, and how many tokens their answers may have."""

from server.errors import InvalidValue, PromptTooLong
from server.http.common.inputs import MAX_PROMPTS, checked_ids
from server.text.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 256  # a longer text cannot fit in the context, whatever it says: it is not worth tokenizing


def encode_prompts(
    tokenizer: Tokenizer, prompts: list[str | list[int]], max_model_len: int, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidValue and PromptTooLong."""
    return [
        encode_text(tokenizer, prompt, max_model_len, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str)
        else checked_ids(prompt, tokenizer.vocab_size, "prompt")
        for prompt in prompts
    ]


def encode_chat(tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered conversation, whose special tokens the template has written."""
    return encode_text(tokenizer, text, max_model_len, add_special_tokens=add_special_tokens, param="messages")


def encode_text(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool = True, param: str = "prompt"
) -> list[int]:
    """Token ids of `text`, at least one. `param`: the field it is of. Raises InvalidValue and PromptTooLong."""
    limit = max_model_len * MAX_CHARS_PER_TOKEN
    if len(text) > limit:
        raise PromptTooLong(
            f"This model's context holds {max_model_len} tokens, at most {limit} characters; "
            f"the prompt has {len(text)} characters.",
            param=param,
        )
    token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidValue("The prompt is empty: it has 0 tokens and needs 1.", param=param)
    return token_ids


def held(text: str, max_model_len: int, *, keeps_end: bool) -> str:
    """The beginning or the end of a text whose tokens will be cut: as much as a context could hold."""
    limit = max_model_len * MAX_CHARS_PER_TOKEN
    return text[-limit:] if keeps_end else text[:limit]


def truncated(token_ids: list[int], limit: int, room: int, *, keeps_end: bool) -> list[int]:
    """The first or last tokens of a prompt, at most `limit`; -1: `room`. Raises InvalidValue."""
    if limit == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1, got 0."
        raise InvalidValue(message, param="truncate_prompt_tokens")
    limit = max(1, room) if limit == -1 else limit
    return token_ids[-limit:] if keeps_end else token_ids[:limit]


def check_choices(num_prompts: int, num_choices: int) -> None:
    """Raises InvalidValue when a request asks for too many answers."""
    if num_prompts * num_choices > MAX_PROMPTS:
        message = f"A request may ask for {MAX_PROMPTS} answers, n = {num_choices} for {num_prompts} prompts is more."
        raise InvalidValue(message, param="n")


def check_lengths(
    num_prompt_tokens: int,
    max_tokens: int | None,
    default: int | None,
    max_model_len: int,
    *,
    param: str = "prompt",
    may_be_less: bool = False,
) -> int:
    """The number of tokens that may be generated. Raises PromptTooLong when prompt and answer do not fit.

    max_tokens   as the request has it
    default      where the request has none; None: as many as fit
    param        the field that the prompt is of
    may_be_less  whether an answer may have fewer than `max_tokens` where the context holds no more
    """
    room = max_model_len - num_prompt_tokens
    if may_be_less and max_tokens is not None and room > 0:
        max_tokens = min(max_tokens, room)
    if room >= (max_tokens or 1):
        return max_tokens or min(room, default or room)
    wanted = f"{num_prompt_tokens} in the prompt and {max_tokens or 'at least 1'} in the completion"
    raise PromptTooLong(
        f"This model's maximum context length is {max_model_len} tokens, but the request has "
        f"{num_prompt_tokens + (max_tokens or 1)}: {wanted}.",
        param="max_tokens" if room > 0 else param,
    )
