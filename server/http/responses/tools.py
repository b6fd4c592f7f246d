"""Tools of a Responses request as functions of a chat, and the calls of those functions as items of the API.

A function of a namespace is given to the model as `namespace__name`; its call has the two names apart, as OpenAI's
has, and as Codex looks them up. A custom tool, whose input is a text, is a function with the argument `input`. A
search for tools that the client makes is the function `tool_search`.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from server.errors import InvalidValue, UnsupportedField
from server.http.responses.requests import (
    AdditionalToolsItem,
    AllowedToolChoice,
    CustomTool,
    FunctionTool,
    HostedTool,
    Item,
    NamedToolChoice,
    NamespaceTool,
    SearchOutputItem,
    SearchTool,
    Tool,
)

SEARCH = "tool_search"
INPUT = "input"  # the argument that holds the text for a custom tool
_SEPARATOR = "__"
_MAX_NAME_CHARS = 128  # of a function in a chat
_DIGEST_CHARS = 8
# Arguments that are cut within the input's text or right behind it, up to what is whole: no escape in part, nor a pair.
_CUT_INPUT = re.compile(
    rf'(\s*\{{\s*"{INPUT}"\s*:\s*"(?:[^"\\\x00-\x1f]|\\[^u]'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|(?:\\u[0-9a-fA-F]{4}){2})*+)"
    r'(?:\\.{0,10}|"\s*)?'
)


class Called(Enum):
    """Kinds of calls, by the type of their items."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    SEARCH = "tool_search_call"


@dataclass(frozen=True, slots=True)
class Callee:
    """A tool that the model may call, by the names that the client gave it."""

    name: str
    namespace: str | None = None
    kind: Called = Called.FUNCTION

    @property
    def flat_name(self) -> str:
        return flat_name(self.name, self.namespace)


class ToolSet:
    """The tools of a request, and those that its input gives. Raises InvalidValue for two that the model cannot tell
    apart by their names."""

    def __init__(self, tools: Sequence[Tool], items: Iterable[Item] = ()) -> None:
        self._tools = tools
        self._hosted: list[tuple[str, str]] = []  # place and type
        self._functions: dict[str, dict[str, Any]] = {}  # by their names to the model
        self._callees: dict[str, Callee] = {}
        for i, tool in enumerate(tools):
            self._add(tool, f"tools[{i}]")
        for i, item in enumerate(items):
            if isinstance(item, AdditionalToolsItem | SearchOutputItem):
                for j, tool in enumerate(item.tools):
                    self._add(tool, f"input[{i}].tools[{j}]")

    def _add(self, tool: Tool, place: str) -> None:
        if _is_hosted(tool):
            self._hosted.append((place, tool.type))
        for callee, function in _functions_of(tool):
            name = callee.flat_name
            if self._callees.setdefault(name, callee) != callee:
                raise InvalidValue(f"{place}: another tool has the name {name!r} already.", param=place)
            if place.startswith("tools") and self._functions.get(name, function) != function:
                raise InvalidValue(f"{place}: a different function has the name {name!r} already.", param=place)
            self._functions[name] = function  # a later one of the input is a newer one

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools of the chat request."""
        return [{"type": "function", "function": function} for function in self._functions.values()]

    @property
    def visible(self) -> list[dict[str, Any]]:
        """The tools that the model sees, as an answer repeats them."""
        return [_repeated(tool) for tool in self._tools if not _is_hosted(tool)]

    @property
    def left_out(self) -> list[str]:
        """The types of tools that the model does not see: a server would have to run them."""
        return list(dict.fromkeys(kind for _, kind in self._hosted))

    def callee(self, flat: str) -> Callee:
        """The tool that a function of the chat stands for."""
        return self._callees.get(flat) or Callee(flat)

    def choice_of(self, choice: str | NamedToolChoice | AllowedToolChoice | None) -> str | dict[str, Any] | None:
        """The `tool_choice` of the chat request.

        Raises UnsupportedField where only tools that are left out could be called, InvalidValue for an unknown name.
        """
        if isinstance(choice, AllowedToolChoice):
            return self._allowed(choice)
        if isinstance(choice, NamedToolChoice):
            return self._function(choice, "tool_choice")
        if choice == "required" and self._hosted and not self._functions:
            raise _asks_for(*self._hosted[0])
        return choice

    def _allowed(self, choice: AllowedToolChoice) -> str | dict[str, Any]:
        """The choice of the allowed tools that the model can see: `none` where it sees none of them."""
        functions = []
        for i, tool in enumerate(choice.tools):
            place = f"tool_choice.tools[{i}]"
            if isinstance(tool, NamedToolChoice):
                functions.append(self._function(tool, place))
            elif tool.type not in self.left_out:
                raise InvalidValue(f"{place}: no tool of tools has the type {tool.type!r}.", param=place)
        if functions:
            return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": functions}}
        if choice.mode == "required":
            raise _asks_for("tool_choice.tools[0]", choice.tools[0].type)
        return "none"

    def _function(self, choice: NamedToolChoice, place: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self._named(choice, place)}}

    def _named(self, choice: NamedToolChoice, place: str) -> str:
        """The function that is chosen at `place`, by its own name or with its namespace."""
        kind = Called.CUSTOM if choice.type == "custom" else Called.FUNCTION
        found = [
            flat for flat, callee in self._callees.items() if choice.name in (callee.name, flat) and callee.kind is kind
        ]
        for flat in found:
            if flat == choice.name:
                return flat
        if len(found) == 1:
            return found[0]
        what = "no" if not found else "more than one"
        message = f"{place} names {what} {choice.type} tool of tools; send the name of one of them"
        message += ", with namespace__ before it." if found else "."
        raise InvalidValue(message, param=place)


def _asks_for(place: str, kind: str) -> UnsupportedField:
    message = f"{place}: the type {kind!r} is not implemented, and tool_choice asks for a call of it."
    return UnsupportedField(message, param=f"{place}.type")


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function to the model; one that is too long is cut, and has a digest at its end."""
    if namespace is None:
        return name
    flat = f"{namespace}{_SEPARATOR}{name}"
    if len(flat) <= _MAX_NAME_CHARS:
        return flat
    digest = hashlib.blake2b(flat.encode(), digest_size=_DIGEST_CHARS // 2).hexdigest()
    return f"{flat[: _MAX_NAME_CHARS - 1 - len(digest)]}_{digest}"


def arguments_of(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_of(arguments: str) -> str:
    """The input of a custom tool, out of its function's arguments, cut ones too; of others, all that was written."""
    if f'{{"{INPUT}":'.startswith("".join(arguments.split())):
        return ""
    cut = _CUT_INPUT.fullmatch(arguments)
    try:
        found = msgspec.json.decode(f'{cut[1]}"}}' if cut else arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = found.get(INPUT)
    return text if isinstance(text, str) else arguments


def found_text(item: SearchOutputItem) -> str:
    """The result of a search for the model: the names of the tools that were found, by which it may call them."""
    names = [callee.flat_name for tool in item.tools for callee, _ in _functions_of(tool)]
    return msgspec.json.encode({"found_tools": names}).decode()


def _is_hosted(tool: Tool) -> bool:
    return isinstance(tool, HostedTool) or (isinstance(tool, SearchTool) and tool.execution == "server")


def _functions_of(tool: Tool) -> Iterator[tuple[Callee, dict[str, Any]]]:
    match tool:
        case FunctionTool() | CustomTool():
            yield _function_of(tool, None, "")
        case NamespaceTool():
            preface = tool.description  # once, before its first function: some are pages long
            for inner in tool.tools:
                yield _function_of(inner, tool.name, preface)
                preface = ""
        case SearchTool() if tool.execution == "client":
            yield _search_of(tool)


def _function_of(tool: FunctionTool | CustomTool, namespace: str | None, preface: str) -> tuple[Callee, dict[str, Any]]:
    callee = Callee(tool.name, namespace, Called.CUSTOM if isinstance(tool, CustomTool) else Called.FUNCTION)
    function: dict[str, Any] = {"name": callee.flat_name}
    texts: Iterable[str] = (preface, tool.description, _form_of(tool) if isinstance(tool, CustomTool) else "")
    description = "\n\n".join(filter(None, texts))
    if description:
        function["description"] = description
    if isinstance(tool, CustomTool):
        text: Mapping[str, Any] = {"type": "string", "description": "The whole input of the tool, as plain text."}
        function["parameters"] = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return callee, function
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return callee, function


def _search_of(tool: SearchTool) -> tuple[Callee, dict[str, Any]]:
    function: dict[str, Any] = {"name": SEARCH}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return Callee(SEARCH, kind=Called.SEARCH), function


def _repeated(tool: Tool) -> dict[str, Any]:
    # Field by field: pydantic writes no member of a union whose discriminator reads JSON.
    match tool:
        case NamespaceTool():
            inner = [_repeated(it) for it in tool.tools]
            return {"type": tool.type, "name": tool.name, "description": tool.description, "tools": inner}
        case CustomTool():
            form = None if tool.format is None else tool.format.model_dump()
            return {"type": tool.type, "name": tool.name, "description": tool.description, "format": form}
    return tool.model_dump()


def repeated_choice(choice: str | NamedToolChoice | AllowedToolChoice | None) -> str | dict[str, Any]:
    """The choice of a request as an answer repeats it."""
    if isinstance(choice, AllowedToolChoice):
        return {"type": choice.type, "mode": choice.mode, "tools": [tool.model_dump() for tool in choice.tools]}
    return choice.model_dump() if isinstance(choice, NamedToolChoice) else choice or "auto"


def _form_of(tool: CustomTool) -> str:
    """A sentence for the model on the form of a custom tool's input; empty where any text is one."""
    form = tool.format
    if form is None or form.type == "text":
        return ""
    return f"The input matches this {form.syntax} grammar:\n{form.definition}"
