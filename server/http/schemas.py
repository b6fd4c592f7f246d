"""Requests as OpenAI's clients send them. What we do not implement is refused by its name, never ignored."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.inspect import ListType, LiteralType, NoneType, StructType, Type, UnionType, type_info

from server.edge.redact import plain_name, shown
from server.errors import HallmarkError, InvalidValue, UnknownField, UnsupportedField
from server.http.token_ids import are_ids, ids_of
from server.text.sampling_defaults import LEAST_REPETITION_PENALTY

MAX_PROMPTS = 64  # also of answers: prompts times n
MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 5  # likeliest tokens at each place, OpenAI's limit

# Fields that OpenAI or vLLM define and we do not implement, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


ModelT = TypeVar("ModelT", bound=_Model)
_FIELD = re.compile(r"Object (?:contains|missing) (?P<kind>unknown|required) field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class StreamOptions(_Model, frozen=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # only so


class GenerationFields(_Model, frozen=True, kw_only=True):
    """What both endpoints take. Limits that depend on the model are checked when its tokens are known.

    Sampling that is None is left to the model's authors.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1  # answers for each prompt
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    stop: Any = None  # see stops_of
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    # Whom a request is for: nothing here depends on it. The first is OpenAI's old name of the other two.
    user: Annotated[str, Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    prompt: Any  # see prompts_of
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0 with echo only
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # of the prompt, with echo
    return_tokens_as_token_ids: bool = False  # names of tokens in logprobs, as vLLM writes them


class Message(_Model, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None  # see _text_of; only an assistant may have said nothing
    name: Annotated[str, Meta(max_length=64)] | None = None


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class TokenizeFields(_Model, frozen=True, kw_only=True):
    model: str | None = None
    prompt: Any = None  # either this, a string
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None  # or these
    add_generation_prompt: bool = True


class DetokenizeFields(_Model, frozen=True, kw_only=True):
    model: str | None = None
    tokens: Any


def read(kind: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """`body` as a valid `kind`. Raises UnsupportedField, UnknownField or InvalidValue, each naming the field."""
    given = _without_absent(body, kind, "")
    if "messages" in _names(kind) and isinstance(given.get("messages"), list):
        given["messages"] = [
            _without_absent(message, Message, f"messages[{i}].") if isinstance(message, dict) else message
            for i, message in enumerate(given["messages"])
        ]
    try:
        fields = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), given, kind) from None
    except UnicodeEncodeError:  # of a text where none may be, which msgspec looks at as UTF-8
        for name, value in given.items():
            checked_text(json.dumps(value, ensure_ascii=False), name)
        raise
    options = getattr(fields, "stream_options", None)
    if isinstance(options, StreamOptions) and options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise UnsupportedField(f"The field {param!r} is not implemented; all it may be is false.", param=param)
    return fields


@cache
def _names(kind: type[_Model]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _without_absent(body: Mapping[str, Any], kind: type[_Model], prefix: str) -> dict[str, Any]:
    """`body` without nulls and without unimplemented fields that ask for nothing."""
    given, known = {}, _names(kind)
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = value
        elif name not in _UNSUPPORTED:
            field = prefix + plain_name(name)
            raise UnknownField(f"The field {field!r} is unknown.", param=field)
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _UNSUPPORTED[name]):
            neutral = " or ".join(map(json.dumps, _UNSUPPORTED[name]))
            but = f"; all it may be is {neutral}" if neutral else ""
            raise UnsupportedField(f"The field {prefix + name!r} is not implemented{but}.", param=prefix + name)
    return given


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """One or several prompts, each a text or token ids. Raises InvalidValue."""
    if isinstance(prompt, str):
        return [checked_text(prompt, "prompt")]
    if are_ids(prompt):
        return [prompt]
    kinds = "prompt must be a string, token ids or a list of either"
    if not isinstance(prompt, list) or not prompt:
        raise InvalidValue(f"{kinds}, got {shown(prompt)}.", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidValue(f"prompt may hold {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt")
    found: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        where = f"prompt[{i}]"
        if not isinstance(item, str | list):
            raise InvalidValue(f"{kinds}, got {shown(item)} at {where}.", param=where)
        found.append(checked_text(item, where) if isinstance(item, str) else ids_of(item, where))
    return found


def stops_of(stop: Any) -> tuple[str, ...]:
    """The stop strings. Raises InvalidValue."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise InvalidValue(f"stop must be a string or a list of strings, none empty, got {shown(stop)}.", param="stop")
    if len(stops) > MAX_STOPS:
        raise InvalidValue(f"stop may hold {MAX_STOPS} strings, got {len(stops)}.", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise InvalidValue(f"A stop string may have {MAX_STOP_CHARS} characters, got {longest}.", param="stop")
    return tuple(checked_text(item, "stop") for item in stops)


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages for the chat template: a role, a text and perhaps a name. Raises InvalidValue and UnsupportedField."""
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if message.content is None and message.role != "assistant":
            raise InvalidValue(f"The field {where!r} is missing.", param=where)
        role = "system" if message.role == "developer" else message.role  # OpenAI's newer name of it
        plain = {"role": role, "content": _text_of("" if message.content is None else message.content, where)}
        found.append(plain if message.name is None else plain | {"name": checked_text(message.name, "name")})
    return found


def _text_of(content: Any, param: str) -> str:
    """A content's text; parts are joined by newlines."""
    if isinstance(content, str):
        return checked_text(content, param)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidValue(f"{param} must be a string or a list of text parts, got {shown(content)}.", param=param)
    for i, part in enumerate(content):
        where = f"{param}[{i}]"
        if part.get("type") != "text":
            raise UnsupportedField(f"{where} is not of type 'text', the only one implemented.", param=f"{where}.type")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise InvalidValue(f"{where} must have exactly 'type' and 'text', a string.", param=where)
    return "\n".join(checked_text(part["text"], param) for part in content)


def checked_text(text: str, param: str) -> str:
    """`text`, which UTF-8 must be able to carry: JSON can smuggle in half a surrogate pair. Raises InvalidValue."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{param} has a lone surrogate at character {error.start}.", param=param) from None
    return text


def _named(problem: str, given: Mapping[str, Any], kind: type[_Model]) -> HallmarkError:
    """What msgspec says of a value, as an error that names its field."""
    what, has_path, path = problem.rpartition(" - at `$.")  # the last: a name before it is the client's own text
    what, field = (what, path.rstrip("`")) if has_path else (path, "")
    if found := _FIELD.fullmatch(what):  # a field that lacks, or is too much, is named beside where it belongs
        field = plain_name(".".join(filter(None, [field, found["name"]])))
        if found["kind"] == "unknown":
            return UnknownField(f"The field {field!r} is unknown.", param=field)
        return InvalidValue(f"The field {field!r} is missing.", param=field)
    if what.startswith("Invalid enum value"):
        what = _choices_at(kind, field)  # msgspec names none of them
    expected = what.partition(", got ")[0].removeprefix("Expected ").replace("`", "").removesuffix(" | null")
    return InvalidValue(f"{field} must be {expected}, got {shown(_value_at(given, field))}.", param=field)


def _choices_at(kind: type[_Model], field: str) -> str:
    """The few values that may stand where a path such as `messages[0].role` leads to, in words."""
    found: Type = type_info(kind)
    for name, _ in _STEP.findall(field):
        if isinstance(found, StructType):
            found = next(part.type for part in found.fields if part.encode_name == name)
        elif isinstance(found, ListType):
            found = found.item_type
        if isinstance(found, UnionType):  # with null, which is left out before
            found = next(part for part in found.types if not isinstance(part, NoneType))
    assert isinstance(found, LiteralType), f"{field} takes {found}"
    return " or ".join(map(str, found.values))


def _value_at(given: Any, field: str) -> Any:
    """The value that a path such as `messages[0].role` leads to."""
    for name, index in _STEP.findall(field):
        given = given[name] if name else given[int(index)]
    return given
