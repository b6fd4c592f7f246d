"""Tools for a model whose chat template has no place for them: described in the system's message, as for Hermes."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from server.text.request_text import is_of_request, joined, of_request

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
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            found.append({"role": "assistant", "content": joined(filter(None, [message["content"], *calls]), "\n")})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("is_response", None)
    if tools:
        text = joined((_HEAD, joined(map(_json, tools), "\n"), _TAIL))
        if found and found[0]["role"] == "system":
            found[0]["content"] = joined((found[0]["content"], text), _GAP)
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


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


def _call_text(function: dict[str, Any]) -> str:
    call = _json({"name": function["name"], "arguments": function["arguments"]})
    return joined(("<tool_call>\n", call, "\n</tool_call>"))


def _json(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return of_request(text) if is_of_request(value) else text
