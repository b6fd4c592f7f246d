"""Rendering of a chat's messages, tools and options as the text that the model reads."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from server.errors import InvalidJson, InvalidValue, TemplateError, TemplateRefusal, UnsupportedField
from server.http.chat.requests import ChatImagePart, ChatRequest, ChatTextPart, ImageBounds, Message
from server.http.chat.tools import ToolCall, ToolUse
from server.http.common.json_body import parse_json
from server.http.images.source import ImageSource
from server.text.answer.formats import FORMATS
from server.text.answer.history import writer_of
from server.text.answer.syntax import AnswerSyntax
from server.text.chat_template import ChatTemplate
from server.text.image_places import Marks
from server.text.request_text import RequestText, joined
from server.text.tokenizer import Tokenizer
from server.text.tools import (
    arguments_as_text,
    calls_in_content,
    system_first,
    system_in_user,
    tools_as_text,
    tools_described,
    tools_in_system,
    turns_joined,
    without_content,
)

_NO_REASONING = "none"  # the effort


class PromptEnd(Enum):
    """End of a conversation's prompt."""

    OPENED = "opened"  # with the opening of the assistant's turn
    CLOSED = "closed"  # with the end of the last message
    CONTINUED = "continued"  # with the text of the last message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input of a chat template.

    images, marks   of messages with images, whose texts have a mark for each, in order
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()
    marks: Marks | None = None


def conversation_of(fields: ChatRequest, tools: ToolUse) -> Conversation:
    """The conversation of a valid request. Raises InvalidValue."""
    options = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        options.setdefault("reasoning_effort", fields.reasoning_effort)
        if fields.reasoning_effort == _NO_REASONING:
            options.setdefault("enable_thinking", False)
    if fields.verbosity is not None:
        options.setdefault("verbosity", fields.verbosity)
    return conversation_with(
        fields.messages, fields.mm_processor_kwargs, tools.for_template(), fields.documents, options
    )


def conversation_with(
    messages: Sequence[Message],
    bounds: ImageBounds | None,
    tools: list[dict[str, Any]] | None,
    documents: list[dict[str, Any]] | None,
    options: Mapping[str, Any],
) -> Conversation:
    """The conversation of valid messages, which may have images. Raises InvalidValue."""
    images = images_of(messages, bounds)
    marks = Marks() if images else None
    return Conversation(plain_messages(messages, marks), tools, documents, options, images, marks)


def images_of(messages: Sequence[Message], bounds: ImageBounds | None) -> tuple[ImageSource, ...]:
    """The images of all messages, in order. Raises InvalidValue for one in another message than a user's or tool's."""
    found = []
    least, most = (None, None) if bounds is None else (bounds.min_pixels, bounds.max_pixels)
    for i, message in in_order(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if not isinstance(part, ChatImagePart):
                continue
            place = f"messages[{i}].content[{j}]"
            if message.role not in ("user", "tool"):
                raise InvalidValue(f"{place}: a message of role {message.role!r} has no images.", param=place)
            is_low = part.image_url.detail == "low"
            found.append(ImageSource(part.image_url.url, place, least, most, is_low))
    return tuple(found)


def end_of(opens: bool | None, *, continues: bool) -> PromptEnd:
    """The end that two fields ask for. Raises InvalidValue where they contradict each other."""
    if opens and continues:
        message = "add_generation_prompt and continue_final_message cannot both be true."
        raise InvalidValue(message, param="continue_final_message")
    if continues:
        return PromptEnd.CONTINUED
    return PromptEnd.CLOSED if opens is False else PromptEnd.OPENED


def chat_text(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    it: Conversation,
    *,
    syntax: AnswerSyntax,
    end: PromptEnd = PromptEnd.OPENED,
    special_tokens_in_text: bool = False,
) -> str:
    """The text of a conversation. Raises TemplateError, InvalidValue and UnsupportedField.

    special_tokens_in_text  whether a text may spell control tokens; else the result is a RequestText
    """
    if template is None:
        raise UnsupportedField("This model has no chat template; use /v1/completions.", param="messages")
    if end is not PromptEnd.CONTINUED:
        opens = end is PromptEnd.OPENED
        return _rendered(tokenizer, template, it, syntax, opens=opens, has_special_tokens=special_tokens_in_text)
    *before, last = it.messages
    if "tool_calls" in last:
        message = "continue_final_message: the last message has tool calls, behind which nothing can go on."
        raise InvalidValue(message, param="continue_final_message")
    # What a template writes behind the last message's text is cut off at a name that no text can hold.
    name = f"end-{secrets.token_hex(16)}"
    it = replace(it, messages=[*before, last | {"content": f"{last['content']}{name} "}])
    text = _rendered(tokenizer, template, it, syntax, opens=False, has_special_tokens=special_tokens_in_text)
    kept, found, rest = text.rpartition(name)
    if not found:
        message = "The chat template leaves out the last message's text: it cannot be continued."
        raise TemplateError(message, param="continue_final_message")
    return kept if rest.startswith(" ") else kept.rstrip()  # as the template treats spaces at the end of a message


def _rendered(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    it: Conversation,
    syntax: AnswerSyntax,
    *,
    opens: bool,
    has_special_tokens: bool,
) -> str:
    if it.documents and not template.reads("documents", has_tools=bool(it.tools) and syntax.has_tool_template):
        raise UnsupportedField("This model's chat template has no place for documents.", param="documents")
    reserved = template.reserved & it.options.keys()
    if reserved:
        message = f"chat_template_kwargs cannot set {min(reserved)!r}."
        raise InvalidValue(message, param="chat_template_kwargs")
    if not has_special_tokens:
        tags = [text for text in syntax.reasoning_tags if tokenizer.added_ids.get(text) not in tokenizer.special_ids]
        it = replace(
            it,
            messages=[_guarded_message(message, tags) for message in it.messages],
            tools=_guarded(it.tools),
            documents=_guarded(it.documents),
            options=_guarded(it.options),
        )
    tools = it.tools if syntax.has_tool_template else None
    messages = with_places(it, template, syntax)
    refusal: TemplateRefusal | None = None
    for variant in _variants(messages):
        given = variant if it.marks is None else it.marks.with_parts(variant)
        try:
            text = template.render(
                given, add_generation_prompt=opens, tools=tools, documents=it.documents, options=it.options
            )
        except TemplateRefusal as error:
            refusal = refusal or error
        else:
            return str.__str__(text) if has_special_tokens else text
    assert refusal is not None
    raise refusal


def with_places(it: Conversation, template: ChatTemplate, syntax: AnswerSyntax) -> list[dict[str, Any]]:
    """The messages, with tools and calls where the template has a place for them."""
    if not syntax.has_tool_template:
        return tools_as_text(it.messages, it.tools)
    messages = it.messages
    write = writer_of(FORMATS[syntax.calls].shape, template.tool_source)
    if template.reads("tool_calls", has_tools=True):
        if template.leaves_out_calls_beside_text and write is not None:
            messages = [it if not it["content"] else calls_in_content([it], write)[0] for it in messages]
        if template.leaves_out_calls_beside_no_text:
            messages = without_content(messages)
    elif write is not None and any("tool_calls" in message for message in messages):
        messages = calls_in_content(messages, write)
    if write is not None and it.tools and not template.reads("tools", has_tools=True):
        return tools_described(messages, it.tools, write)
    return tools_in_system(messages, it.tools) if it.tools and template.has_tools_of_messages else messages


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages as they are, then as templates take them that refuse what the API allows."""
    yield messages
    first = system_first(messages)
    alternating = turns_joined(first)
    before = messages
    for variant in (first, alternating, system_in_user(alternating)):
        if variant != before:
            yield variant
        before = variant
    if any("tool_calls" in message for message in messages):
        yield arguments_as_text(messages)
    if any(message["content"] is None for message in messages):
        yield from _variants([{**message, "content": message["content"] or ""} for message in messages])


def _guarded_message(message: Mapping[str, Any], tags: Sequence[str]) -> dict[str, Any]:
    """A message with the texts of the request known as such.

    tags  around reasoning: in an assistant's text they stay tokens, as the model wrote them
    """
    found = {key: value if key == "role" else _guarded(value) for key, value in message.items()}
    if message["role"] == "assistant" and tags:
        pieces = re.split(f"({'|'.join(map(re.escape, tags))})", message["content"])
        found["content"] = joined(piece if piece in tags else RequestText(piece) for piece in pieces)
    return found


def _guarded(value: Any) -> Any:
    """The value with every text in it known as the request's. Its depth is limited already."""
    if isinstance(value, str):
        return RequestText(value)
    if isinstance(value, Mapping):
        return {RequestText(key): _guarded(inner) for key, inner in value.items()}
    return [_guarded(inner) for inner in value] if isinstance(value, list) else value


def in_order(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """The messages with their places in the request: results of calls in the order of the calls.

    Most templates write no ids of results, so that a model reads the first result as that of the first call.
    """
    found = [*enumerate(messages)]
    for i, message in enumerate(messages):
        if not message.tool_calls:
            continue
        calls = [call.id for call in message.tool_calls]
        end = next((j for j in range(i + 1, len(messages)) if messages[j].role != "tool"), len(messages))
        results = [it.tool_call_id for it in messages[i + 1 : end]]
        if len(set(results)) == len(results) and set(results) <= set(calls) and len(set(calls)) == len(calls):
            found[i + 1 : end] = sorted(found[i + 1 : end], key=lambda it: calls.index(it[1].tool_call_id or ""))
    return found


def plain_messages(messages: Sequence[Message], marks: Marks | None = None) -> list[dict[str, Any]]:
    """Messages for the chat template: a role, a text, perhaps a name, calls and their results. Raises InvalidValue.

    marks  where there are images, which the texts have marks for
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, message in in_order(messages):
        content = message.content
        if content is None and message.role != "assistant":
            where = f"messages[{i}].content"
            raise InvalidValue(
                f"The field {where!r} is missing or null; only an assistant's message may be without text.", param=where
            )
        _check_role(message, i)
        role = "system" if message.role == "developer" else message.role  # OpenAI's newer name of it
        text = content if isinstance(content, str) else _text_of(content or (), marks)
        plain: dict[str, Any] = {"role": role, "content": text}
        if message.name is not None:
            plain["name"] = message.name
        if role == "tool":
            plain["tool_call_id"] = message.tool_call_id or ""
            if plain["tool_call_id"] in names:
                plain.setdefault("name", names[plain["tool_call_id"]])
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not (text and message.tool_calls):
                plain["thinking"] = reasoning  # gpt-oss's name; its template refuses both beside calls
        found.append(plain)
    return found


def _text_of(parts: Sequence[ChatTextPart | ChatImagePart], marks: Marks | None) -> str:
    if marks is not None and any(isinstance(part, ChatImagePart) for part in parts):
        return marks.text_of([part.text if isinstance(part, ChatTextPart) else None for part in parts])
    return "\n".join(part.text for part in parts if isinstance(part, ChatTextPart))


def _check_role(message: Message, index: int) -> None:
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        if getattr(message, name) and message.role != "assistant":
            where = f"messages[{index}].{name}"
            raise InvalidValue(f"{where} belongs to an assistant's message, not to a {message.role}'s.", param=where)
    if message.tool_call_id is not None and message.role != "tool":
        where = f"messages[{index}].tool_call_id"
        raise InvalidValue(f"{where} belongs to a tool's message, not to a {message.role}'s.", param=where)


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: its arguments are an object, as far as they are JSON."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        value = parse_json(text.encode())
        for_utf8 = str(value).encode  # an escape may stand for half a surrogate pair
        for_utf8()
    except (InvalidJson, UnicodeEncodeError):
        return text
    return value
