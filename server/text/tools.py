"""Tools for a model whose chat template has no place for them: described in the system's message, as for Hermes."""

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from server.text.request_text import is_of_request, joined, of_request

_WITH_TOOLS = "You are a helpful assistant with some tools."  # Phi-4-mini's system, where a request has none
_GAP = "\n\n"  # between a system's texts
_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_OWN_TAIL = "\n</tools>\n\nCall functions in exactly this form, with a name and JSON of that function's parameters:\n"
_EXAMPLE = {"name": "function_name", "arguments": {"parameter_name": "value"}}


def tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages of the roles system, user and assistant only, with all about tools as text. Of Qwen2.5's wording."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = joined(("<tool_response>\n", message["content"], "\n</tool_response>"))
            if found and found[-1].get("is_response"):
                found[-1]["content"] = joined((found[-1]["content"], text), "\n")
            else:
                found.append({"role": "user", "content": text, "is_response": True})
        elif "tool_calls" in message:
            calls = [hermes_call(call["function"]) for call in message["tool_calls"]]
            found.append({"role": "assistant", "content": joined(filter(None, [message["content"], *calls]), "\n")})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("is_response", None)
    return _with_system(found, joined((_HEAD, joined(map(request_json, tools), "\n"), _TAIL))) if tools else found


def tools_described(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    write: Callable[[Sequence[dict[str, Any]]], str],
) -> list[dict[str, Any]]:
    """The same conversation for a template that has calls and no tools: these, and how `write` writes a call of one."""
    described = (_HEAD, joined(map(request_json, tools), "\n"), _OWN_TAIL, write([_EXAMPLE]))
    return _with_system(messages, joined(described))


def _with_system(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system's."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": joined((messages[0]["content"], text), _GAP)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def system_in_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template without system messages: its text begins the first user's."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return [*messages]
    first = {**messages[1], "content": joined((messages[0]["content"], messages[1]["content"]), _GAP)}
    return [first, *messages[2:]]


def system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template with one system message, the first: it has the text of all."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": joined(filter(None, texts), _GAP)}, *others] if texts else others


def turns_joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template whose roles alternate: texts of one role behind each other are one."""
    found: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        for message in group:
            is_text = role in ("user", "assistant") and "tool_calls" not in message
            if is_text and found and found[-1]["role"] == role and "tool_calls" not in found[-1]:
                text = joined(filter(None, (found[-1]["content"], message["content"])), "\n")
                found[-1] = {**found[-1], **message, "content": text}
            else:
                found.append(message)
    return found


def hermes_call(function: dict[str, Any]) -> str:
    """Return a call as Hermes writes it."""
    call = request_json({"name": function["name"], "arguments": function["arguments"]})
    return joined(("<tool_call>\n", call, "\n</tool_call>"))


def arguments_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that joins the arguments of calls to other texts: they are JSON."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def calls_in_content(
    messages: Sequence[dict[str, Any]], write: Callable[[Sequence[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The same conversation for a template without calls: in a message's text, as `write` writes them."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        calls = [call["function"] for call in message["tool_calls"]]
        return {**message, "content": joined((message["content"], write(calls)))}

    return [changed(message) if "tool_calls" in message else message for message in messages]


def without_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that writes calls only where a message's content is none."""
    return [{**it, "content": None} if "tool_calls" in it and not it["content"] else it for it in messages]


def tools_in_system(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same conversation for a template that has tools of the system's message: JSON of functions."""
    if not tools:
        return [*messages]
    written = request_json([tool["function"] for tool in tools])
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": written}, *messages[1:]]
    return [{"role": "system", "content": _WITH_TOOLS, "tools": written}, *messages]


def request_json(value: Any) -> str:
    """Return JSON, as a request's text where such a text is in the value."""
    text = json.dumps(value, ensure_ascii=False)
    return of_request(text) if is_of_request(value) else text


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    return {
        **call,
        "function": {**function, "arguments": given if isinstance(given, str) else request_json(given)},
    }
