"""The input of a stored answer, item by item, as OpenAI's client lists it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import msgspec

from server.errors import InvalidValue
from server.http.common.query import Query, parameter
from server.http.responses.requests import Includable
from server.http.responses.store import Stored

MAX_LIMIT = 100
INCLUDABLE = get_args(Includable)  # which ask for nothing: reasoning is given as it is, no item has the others
KNOWN = frozenset({"order", "limit", "after", "include", "include[]"})
INCLUDE = parameter(
    "include[]", "Taken, and changes nothing.", {"type": "array", "items": {"type": "string", "enum": [*INCLUDABLE]}}
)
PARAMETERS = [
    parameter("order", "`desc`, the default, begins with the last item.", {"type": "string", "enum": ["asc", "desc"]}),
    parameter("limit", "Items of a page. Default: 20.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}),
    parameter("after", "The id of the item before the page, in this order.", {"type": "string"}),
    INCLUDE,
]
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "additional_tools": "at",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "reasoning": "rs",
}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


def with_ids(items: Iterable[Mapping[str, Any]], unique_id: str) -> Iterator[dict[str, Any]]:
    """The items of a request, each with an id that no other has. Those that have one keep it."""
    seen = set()
    for index, item in enumerate(items):
        item_id = item.get("id")
        if not item_id or item_id in seen:
            item_id = f"{_ID_PREFIXES[_kind_of(item)]}_{unique_id}_input_{index}"
        seen.add(item_id)
        yield {**item, "id": item_id}


def input_page(stored: Stored, query: Query) -> dict[str, Any]:
    """A page of the items that an answer was made of, those it continued included.

    Raises InvalidValue for a parameter that is out of its limits, and for a cursor that is no item's id.
    """
    for name in ("include", "include[]"):
        query.choices(name, INCLUDABLE)
    order = query.choice("order", ("asc", "desc")) or "desc"
    limit = query.number("limit", maximum=MAX_LIMIT, default=20)
    after = query.text("after")
    num_output = len(msgspec.json.decode(stored.response)["output"])
    conversation = msgspec.json.decode(stored.items)
    items = conversation[: len(conversation) - num_output]
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = 1 + next((index for index, item in enumerate(items) if item["id"] == after), -1)
        if not start:
            raise InvalidValue(f"after: no input item of this response has the id {after[:128]!a}.", param="after")
    page = [_listed(item) for item in items[start : start + limit]]
    return {
        "object": "list",
        "data": page,
        "has_more": start + limit < len(items),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _kind_of(item: Mapping[str, Any]) -> str:
    return item.get("type") or "message"


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item in the form that the client's types have, whichever form it was sent in."""
    kind = _kind_of(item)
    fields = {"id": item["id"], "type": kind, "status": item.get("status") or "completed"}
    if kind == "message":
        return {**fields, "role": item["role"], "content": _content(item["role"], item["content"])}
    if kind in _CALLS:
        namespace = {} if item.get("namespace") is None else {"namespace": item["namespace"]}
        return fields | {name: item[name] for name in ("call_id", "name", _CALLS[kind])} | namespace
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item["output"]
        return {**fields, "call_id": item["call_id"], "output": output if isinstance(output, str) else _parts(output)}
    if kind == "tool_search_call":
        return {**fields, "call_id": item["call_id"], "execution": "client", "arguments": item.get("arguments") or {}}
    if kind == "tool_search_output":
        return {**fields, "call_id": item["call_id"], "execution": "client", "tools": item.get("tools") or []}
    if kind == "additional_tools":
        return {**fields, "role": "developer", "tools": item.get("tools") or []}
    parts = {name: item.get(name) or [] for name in ("summary", "content")}
    return fields | {
        name: [{"type": part["type"], "text": part["text"]} for part in found] for name, found in parts.items()
    }


def _content(role: str, content: Any) -> list[dict[str, Any]]:
    parts = [{"text": content}] if isinstance(content, str) else content
    if role != "assistant":
        return _parts(parts)
    return [{"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []} for part in parts]


def _parts(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "input_text", "text": part["text"]}
        if "text" in part
        else {"type": "input_image", "image_url": part["image_url"], "detail": part.get("detail") or "auto"}
        for part in parts
    ]
