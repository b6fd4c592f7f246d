"""Conversion of an Anthropic request into the chat request that says the same."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from server.errors import InvalidValue, UnsupportedField
from server.http.anthropic.requests import (
    Block,
    ClientTool,
    CountTokensRequest,
    FixedToolChoice,
    FreeToolChoice,
    ImageBlock,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    ServerTool,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)
from server.http.anthropic.signatures import thinking_of

# Fields of a chat request, and those of Anthropic's that they are made of.
FIELDS = {
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_SEARCHES = "tool_search_tool"  # begins the types of searches by Anthropic's servers
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(fields: MessagesRequest) -> dict[str, Any]:
    """The body of the chat request. Raises InvalidValue."""
    body = prompt_of(fields)
    body["max_tokens"] = fields.max_tokens
    body |= {"stream": fields.stream, "priority": fields.priority, "timeout": fields.timeout}
    body["receipt"] = fields.receipt
    given = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
    body |= {name: value for name, value in given.items() if value is not None}
    if fields.stop_sequences:
        body["stop"] = fields.stop_sequences
    return body


def hides_thinking(fields: MessagesRequest) -> bool:
    """Return whether the client asks not to read the thinking of the answer."""
    return fields.thinking is not None and fields.thinking.display in ("omitted", "updates")


def prompt_of(fields: CountTokensRequest) -> dict[str, Any]:
    """The fields of a chat request that its prompt depends on. Raises InvalidValue."""
    messages = [] if fields.system is None else [{"role": "system", "content": _content(fields.system)}]
    messages += _conversation(fields.messages)
    is_thinking = fields.thinking is not None and fields.thinking.type != "disabled"
    variables = {"enable_thinking": is_thinking} | (fields.chat_template_kwargs or {})
    body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": variables}
    if fields.messages[-1].role == "assistant":
        body["continue_final_message"] = True
    if fields.output_config is not None:
        body |= _output(fields.output_config)
    if fields.model is not None:
        body["model"] = fields.model
    tools = [_tool(tool) for tool in _offered_tools(fields)]
    if tools:
        body["tools"] = tools
    choice = fields.tool_choice
    if choice is not None:
        _check_choice(choice, fields.tools)
        named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FixedToolChoice) else None
        body["tool_choice"] = named or _CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    return body


def _offered_tools(fields: CountTokensRequest) -> list[ClientTool]:
    """Return the tools that the template gets.

    A deferred one is among them where the client's search has found it, or `tool_choice` names it. All are where
    Anthropic's servers would search, which is not implemented.
    """
    tools = [tool for tool in fields.tools if isinstance(tool, ClientTool)]
    if any(tool.type.startswith(_SEARCHES) for tool in fields.tools if isinstance(tool, ServerTool)):
        return tools
    found = {
        part.tool_name
        for turn in fields.messages
        for block in _blocks(turn)
        if isinstance(block, ToolResultBlock) and not isinstance(block.content, str)
        for part in block.content
        if isinstance(part, ToolReferenceBlock)
    }
    if isinstance(fields.tool_choice, FixedToolChoice):
        found.add(fields.tool_choice.name)
    return [tool for tool in tools if not tool.defer_loading or tool.name in found]


def left_out(fields: CountTokensRequest) -> list[str]:
    """The types of the tools that the model does not see: a server would have to run them."""
    return list(dict.fromkeys(tool.type for tool in fields.tools if isinstance(tool, ServerTool)))


def _check_choice(choice: FreeToolChoice | FixedToolChoice, tools: Sequence[ClientTool | ServerTool]) -> None:
    """Raises UnsupportedField where the model would have to call a tool that it does not see."""
    if choice.type not in ("any", "tool"):
        return
    named = choice.name if isinstance(choice, FixedToolChoice) else None
    if any(isinstance(tool, ClientTool) and named in (None, tool.name) for tool in tools):
        return
    for i, tool in enumerate(tools):
        if isinstance(tool, ServerTool) and named in (None, tool.name):
            message = f"tools[{i}]: the type {tool.type!r} is not implemented, and tool_choice asks for a call of it."
            raise UnsupportedField(message, param=f"tools[{i}].type")


def _output(config: OutputConfig) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if config.effort is not None:
        body["reasoning_effort"] = config.effort
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.json_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _content(content: str | list[TextBlock]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _blocks(turn: Turn) -> Iterable[Block]:
    content = turn.content
    return [TextBlock(type="text", text=content, cache_control=None)] if isinstance(content, str) else content


def _conversation(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The messages of all turns. Consecutive turns of the user, or of the assistant, are one."""
    messages: list[dict[str, Any]] = []
    role: str | None = None
    for i, turn in enumerate(turns):
        made = _assistant(turn, i) if turn.role == "assistant" else _of_user(turn, i)
        if turn.role == role != "system" and messages[-1]["role"] == made[0]["role"] != "tool":
            messages[-1] = _joined(messages[-1], made.pop(0))
        messages += made
        role = turn.role
    return messages


def _joined(message: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    joined = message | more | {"content": message["content"] + more["content"]}
    thoughts = [it["reasoning_content"] for it in (message, more) if "reasoning_content" in it]
    if thoughts:
        joined["reasoning_content"] = "\n".join(thoughts)
    calls = [call for it in (message, more) for call in it.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _assistant(turn: Turn, index: int) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(_blocks(turn)):
        match block:
            case TextBlock():
                texts.append({"type": "text", "text": block.text})
            case ThinkingBlock():
                thoughts.append(thinking_of(block))
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThinkingBlock():
                pass
            case ToolResultBlock() | ImageBlock():
                raise _misplaced(block, turn, index, i)
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _of_user(turn: Turn, index: int) -> list[dict[str, Any]]:
    """The messages of a turn of the user or the system: results of tools, each by itself, and what is said."""
    messages: list[dict[str, Any]] = []
    said: list[dict[str, Any]] | None = None
    for i, block in enumerate(_blocks(turn)):
        if isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and turn.role == "user"):
            if said is None:
                said = []
                messages.append({"role": turn.role, "content": said})
            said.append({"type": "text", "text": block.text} if isinstance(block, TextBlock) else _image(block))
        elif isinstance(block, ToolResultBlock) and turn.role == "user":
            said = None
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        else:
            raise _misplaced(block, turn, index, i)
    return messages or [{"role": turn.role, "content": []}]


def image_places(fields: CountTokensRequest) -> list[str]:
    """The fields of all images."""
    found = []
    for i, turn in enumerate(fields.messages):
        for j, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            place = f"messages[{i}].content[{j}]"
            if isinstance(block, ImageBlock):
                found.append(place)
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                found += [f"{place}.content[{k}]" for k, it in enumerate(block.content) if isinstance(it, ImageBlock)]
    return found


def _image(block: ImageBlock) -> dict[str, Any]:
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: ToolResultBlock) -> str | list[dict[str, Any]]:
    """The text of a tool's result, or its parts where it has images."""
    content = block.content
    if isinstance(content, list) and any(isinstance(part, ImageBlock) for part in content):
        parts = [
            _image(part) if isinstance(part, ImageBlock) else {"type": "text", "text": _result_text(part)}
            for part in content
        ]
        return [{"type": "text", "text": "Error:"}, *parts] if block.is_error else parts
    if not isinstance(content, str):
        content = "\n".join(_result_text(part) for part in content if not isinstance(part, ImageBlock))
    return f"Error: {content}" if block.is_error else content


def _result_text(part: TextBlock | ToolReferenceBlock) -> str:
    return part.text if isinstance(part, TextBlock) else f"The tool {part.tool_name} can be called now."


def _misplaced(block: Block, turn: Turn, index: int, place: int) -> InvalidValue:
    where = f"messages[{index}].content[{place}]"
    return InvalidValue(f"{where}: a turn of role {turn.role!r} has no {block.type} block.", param=where)


def _tool(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
