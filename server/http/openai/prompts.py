"""From a request's fields to token ids and sampling parameters that the model can take."""

from server.errors import InvalidValue, PromptTooLong, UnsupportedField
from server.http.openai.requests import MAX_PROMPTS, GenerationRequest, Message, checked_ids, plain_messages
from server.protocol.messages import SamplingParams
from server.text.chat_template import ChatTemplate
from server.text.sampling_defaults import SamplingDefaults
from server.text.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 256  # a longer text cannot fit in the context, whatever it says: it is not worth tokenizing


def encode_prompts(tokenizer: Tokenizer, prompts: list[str | list[int]], max_model_len: int) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidValue and PromptTooLong."""
    return [
        encode_text(tokenizer, prompt, max_model_len)
        if isinstance(prompt, str)
        else checked_ids(prompt, tokenizer.vocab_size, "prompt")
        for prompt in prompts
    ]


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: list[Message],
    max_model_len: int,
    *,
    opens: bool = True,
    special_tokens_in_text: bool = False,
) -> list[int]:
    """Token ids of a conversation; `opens` the assistant's turn. Raises TemplateError, PromptTooLong and others.

    special_tokens_in_text  whether a message may spell special tokens; else only the template's own are special
    """
    if template is None:
        raise UnsupportedField("This model has no chat template; use /v1/completions.", param="messages")
    plain = plain_messages(messages)
    if not special_tokens_in_text:
        mark = tokenizer.special_tokens.mark
        plain = [{key: text if key == "role" else mark(text) for key, text in message.items()} for message in plain]
    text = template.render(plain, add_generation_prompt=opens)
    # The template has written the special tokens.
    return encode_text(tokenizer, text, max_model_len, add_special_tokens=False, param="messages")


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


def check_choices(num_prompts: int, num_choices: int) -> None:
    """Raises InvalidValue when a request asks for too many answers."""
    if num_prompts * num_choices > MAX_PROMPTS:
        message = f"A request may ask for {MAX_PROMPTS} answers, n = {num_choices} for {num_prompts} prompts is more."
        raise InvalidValue(message, param="n")


def check_lengths(
    num_prompt_tokens: int, max_tokens: int | None, default: int | None, max_model_len: int, *, param: str = "prompt"
) -> int:
    """The number of tokens that may be generated. Raises PromptTooLong when prompt and answer do not fit.

    max_tokens  as the request has it
    default     where the request has none; None: as many as fit
    param       the field that the prompt is of
    """
    room = max_model_len - num_prompt_tokens
    if room >= (max_tokens or 1):
        return max_tokens or min(room, default or room)
    wanted = f"{num_prompt_tokens} in the prompt and {max_tokens or 'at least 1'} in the completion"
    raise PromptTooLong(
        f"This model's maximum context length is {max_model_len} tokens, but the request has "
        f"{num_prompt_tokens + (max_tokens or 1)}: {wanted}.",
        param="max_tokens" if room > 0 else param,
    )


def sampling_of(
    fields: GenerationRequest, max_tokens: int, vocab_size: int, defaults: SamplingDefaults, *, choice: int = 0
) -> SamplingParams:
    """Return the sampling of one of a prompt's choices: each has the seed after the one before it, if there is one.

    Raises InvalidValue for limits that depend on the model or on one another.
    """
    if fields.min_tokens > max_tokens:
        raise InvalidValue(f"min_tokens is {fields.min_tokens}, max_tokens allows {max_tokens}.", param="min_tokens")
    stop_ids = checked_ids(fields.stop_token_ids, vocab_size, "stop_token_ids") if fields.stop_token_ids else []
    top_k = int(_first(fields.top_k, defaults.top_k, -1))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=min(top_k, vocab_size) if top_k > 0 else None,
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        seed=None if fields.seed is None else (fields.seed + choice + 2**63) % 2**64 - 2**63,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=fields.ignore_eos,
    )


def _first(asked: float | None, recommended: float | None, otherwise: float) -> float:
    """Return the request's own value, else the one that the model's authors recommend, else OpenAI's default."""
    return asked if asked is not None else recommended if recommended is not None else otherwise
