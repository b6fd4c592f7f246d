"""Tools in requests: what a model may call, what it must call, and the calls of a conversation so far."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field
from pydantic_core import PydanticCustomError

from server.errors import InvalidValue
from server.grammar.tool_calls import BoundCalls, bound_calls
from server.grammar.tool_calls import Tool as GrammarTool
from server.http.common.fields import MAX_TOOLS, ArgumentsSchema
from server.http.common.validation import RequestModel, Text, Variants, tag
from server.protocol.messages import Grammar
from server.settings import ToolCallParser
from server.text.answer.parser import Tools

_FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


def _only_function(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("unsupported", "must be 'function', the only type that is implemented")
    return value


_FunctionType = Annotated[Literal["function"], BeforeValidator(_only_function)]


class FunctionDefinition(RequestModel):
    name: _FunctionName = Field(description="Up to 128 letters, digits and _ . : / -")
    description: Text | None = None
    parameters: ArgumentsSchema | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool = Field(
        False,
        description="Whether arguments must match the schema. Those of a forced call do; otherwise the model decides.",
    )


class ChatTool(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"function": FunctionDefinition}

    type: _FunctionType
    function: FunctionDefinition


TOOLS = Variants({"function": ChatTool}, refused=("custom",))


class ChosenFunction(RequestModel):
    name: _FunctionName


class NamedChoice(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"function": ChosenFunction}

    type: _FunctionType
    function: ChosenFunction


class AllowedTools(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"tools": NamedChoice}

    mode: Literal["auto", "required"] = Field(description="Whether the model may call one of them, or must.")
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="Functions of the request's `tools`. The model sees no others."
    )


class AllowedChoice(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"allowed_tools": AllowedTools}

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


TOOL_CHOICES = Variants({"function": NamedChoice, "allowed_tools": AllowedChoice}, refused=("custom",))


def _kind_of_choice(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else TOOL_CHOICES.tag_of(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("text")]
    | Annotated[NamedChoice, tag("function")]
    | Annotated[AllowedChoice, tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="wrong_type",
        custom_error_message="none, auto, required or an object that names functions",
    ),
]


class CalledFunction(RequestModel):
    name: Annotated[Text, Field(max_length=256)]
    arguments: Text = Field("", description="JSON; what is none is given to the template as text.")


class ToolCall(RequestModel):
    """A call of an assistant's message."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"function": CalledFunction}

    id: Annotated[Text, Field(max_length=256)] = ""
    type: _FunctionType = "function"
    function: CalledFunction
    index: int | None = Field(None, description="As a stream has it. Taken, and changes nothing.")


class ToolUse:
    """Checked fields of a request about tools. Raises InvalidValue for a choice of what there is not."""

    def __init__(
        self,
        tools: Sequence[ChatTool] | None,
        choice: "str | NamedChoice | AllowedChoice | None",
        *,
        is_parallel: bool = True,
    ) -> None:
        by_name = {it.function.name: it.function for it in tools or ()}
        if any(it.function != by_name[it.function.name] for it in tools or ()):
            raise InvalidValue("tools: two different functions have the same name.", param="tools")
        self._choice = choice
        self._is_parallel = is_parallel
        self.is_limited = isinstance(choice, AllowedChoice)
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        self.is_forced = mode == "required" or isinstance(choice, NamedChoice)
        if self.is_forced and not by_name:
            raise InvalidValue("tool_choice asks for a call, but there are no tools.", param="tool_choice")
        if isinstance(choice, NamedChoice) and choice.function.name not in by_name:
            raise InvalidValue("tool_choice names a function that is not in tools.", param="tool_choice")
        if isinstance(choice, AllowedChoice):
            by_name = _allowed(by_name, choice.allowed_tools)
        self._functions = {} if choice == "none" else by_name

    @property
    def schemas(self) -> Tools | None:
        """Return the functions that the model may call; None where it may call none."""
        return {name: it.parameters or {} for name, it in self._functions.items()} or None

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates expect them."""
        return [
            {
                "type": "function",
                "function": {"name": it.name}
                | ({} if it.description is None else {"description": it.description})
                | {"parameters": it.parameters or {"type": "object", "properties": {}}},
            }
            for it in self._functions.values()
        ] or None

    def bound(self, form: ToolCallParser, added_ids: Mapping[str, int], answer: Grammar | None = None) -> BoundCalls:
        """Return the grammar of an answer that must be a call, or JSON of `answer`. Raises UnsupportedField."""
        names = [self._choice.function.name] if isinstance(self._choice, NamedChoice) else [*self._functions]
        tools = [GrammarTool(name, self._functions[name].parameters) for name in names]
        is_parallel = self._is_parallel and not isinstance(self._choice, NamedChoice)
        return bound_calls(tools, form, is_parallel=is_parallel, added_ids=added_ids, answer=answer)


def _allowed(by_name: Mapping[str, FunctionDefinition], allowed: AllowedTools) -> dict[str, FunctionDefinition]:
    """The functions that a choice allows, in the order of `tools`. Raises InvalidValue for one that is not there."""
    names = [tool.function.name for tool in allowed.tools]
    for i, name in enumerate(names):
        if name not in by_name:
            place = f"tool_choice.allowed_tools.tools[{i}]"
            raise InvalidValue(f"{place} names a function that is not in tools.", param=place)
    return {name: function for name, function in by_name.items() if name in names}


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, for APIs whose calls have one; as a text in one where they are not JSON."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"malformed_arguments": arguments}
