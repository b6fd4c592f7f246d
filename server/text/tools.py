"""Tools for a model whose chat template has no place for them: described in the system's message, as for Hermes."""

import json
from collections.abc import Sequence
from typing import Any

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
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if found and found[-1].get("is_response"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "is_response": True})
        elif "tool_calls" in message:
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            found.append({"role": "assistant", "content": "\n".join(filter(None, [message["content"], *calls]))})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("is_response", None)
    if tools:
        text = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
        if found and found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{text}"
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def system_in_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template without system messages: its text begins the first user's."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return [*messages]
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
