"""Conversion of a Responses request into the chat request that says the same."""

from collections.abc import Iterable
from typing import Any

import msgspec

from server.http.responses.requests import (
    AdditionalToolsItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputImage,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    SearchCallItem,
    SearchOutputItem,
    TextConfig,
    TextPart,
)
from server.http.responses.tools import SEARCH, ToolSet, arguments_of, flat_name, found_text

# Fields of a chat request, and those of the Responses API that they are made of.
FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logit_bias",
    "structured_outputs",
    "include_reasoning",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "timeout",
    "receipt",
)


def chat_of(fields: ResponsesRequest, tools: ToolSet) -> dict[str, Any]:
    """The body of the chat request. Raises InvalidValue and UnsupportedField."""
    body: dict[str, Any] = {name: getattr(fields, name) for name in _SAME}
    messages = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
    body["messages"] = [*messages, *_messages(items_of(fields))]
    body["max_tokens"] = fields.max_output_tokens
    if tools.functions:
        body["tools"] = tools.functions
    choice = tools.choice_of(fields.tool_choice)
    if choice is not None:
        body["tool_choice"] = choice
    if not fields.parallel_tool_calls:
        body["parallel_tool_calls"] = False
    if fields.text is not None:
        body |= _format(fields.text)
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        body["reasoning_effort"] = fields.reasoning.effort
    if fields.mm_processor_kwargs is not None:
        body["mm_processor_kwargs"] = fields.mm_processor_kwargs.model_dump(exclude_unset=True)
    return body


def items_of(fields: ResponsesRequest) -> list[Item]:
    """The input as items."""
    if not isinstance(fields.input, str):
        return fields.input
    return [MessageItem(role="user", content=fields.input)]


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Messages of a chat: what the assistant reasoned, said and called between two others is one message."""
    messages: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None  # the assistant's message that is not over
    for item in items:
        if isinstance(item, AdditionalToolsItem):  # which the model sees at the beginning
            continue
        if isinstance(item, CallOutputItem | SearchOutputItem):
            own = None
            content = _text(item.output) if isinstance(item, CallOutputItem) else found_text(item)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            own = None
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            if own is None or (isinstance(item, ReasoningItem | MessageItem) and "content" in own):
                own = {"role": "assistant"}
                messages.append(own)
            _add(own, item)
    return messages


def _add(own: dict[str, Any], item: MessageItem | CallItem | CustomCallItem | SearchCallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            own["content"] = _text(item.content)
        case CallItem() | CustomCallItem() | SearchCallItem():
            function = _function_of(item)
            own.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case ReasoningItem():
            text = "\n".join(part.text for part in item.content or item.summary)
            if text:
                own["reasoning_content"] = "\n".join(filter(None, (own.get("reasoning_content"), text)))


def _function_of(item: CallItem | CustomCallItem | SearchCallItem) -> dict[str, str]:
    """The call of a function that an item stands for."""
    match item:
        case CallItem():
            return {"name": flat_name(item.name, item.namespace), "arguments": item.arguments}
        case CustomCallItem():
            return {"name": flat_name(item.name, item.namespace), "arguments": arguments_of(item.input)}
    return {"name": SEARCH, "arguments": msgspec.json.encode(item.arguments).decode()}


def _text(content: str | list[TextPart | InputImage]) -> str | list[dict[str, Any]]:
    """The text of a content, or its parts where it has images."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, InputImage) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in content
    ]


def image_places(fields: ResponsesRequest) -> list[str]:
    """The fields of all images."""
    found = []
    for i, item in enumerate(items_of(fields)):
        content = item.content if isinstance(item, MessageItem) else None
        name = "content"
        if isinstance(item, CallOutputItem):
            content, name = item.output, "output"
        parts = content if isinstance(content, list) else []
        found += [f"input[{i}].{name}[{j}]" for j, part in enumerate(parts) if isinstance(part, InputImage)]
    return found


def _format(text: TextConfig) -> dict[str, Any]:
    body: dict[str, Any] = {} if text.verbosity is None else {"verbosity": text.verbosity}
    wanted = text.format
    if wanted is None:
        return body
    if not isinstance(wanted, SchemaFormat):
        return body | {"response_format": {"type": wanted.type}}
    schema: dict[str, Any] = {"name": wanted.name, "schema": wanted.json_schema}
    if wanted.description:
        schema["description"] = wanted.description
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return body | {"response_format": {"type": "json_schema", "json_schema": schema}}
