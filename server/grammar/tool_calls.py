"""Grammars of answers that must call a tool, in the form in which a model writes calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from server.grammar.schema import schema_text
from server.protocol.messages import Grammar, GrammarKind


class ToolFormat(Enum):
    HERMES = "hermes"  # <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, one after another
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}, separated by "; "
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call. `parameters` is the JSON schema of its arguments; None: of any object."""

    name: str
    parameters: Mapping[str, Any] | None = None


def tool_grammar(
    tools: Sequence[Tool],
    form: ToolFormat,
    *,
    is_parallel: bool = False,
    added_ids: Mapping[str, int] | None = None,
    param: str = "tools",
) -> Grammar:
    """Return the grammar of an answer that is a call of one of `tools`, at least one, and nothing else.

    tools        all of a request for tool_choice "required", the one that is named for a named one
    is_parallel  whether several calls may follow one another
    added_ids    ids of the tokenizer's added tokens by their text: a marker such as <tool_call> may be one
    param        the field that the schemas are of
    Raises UnsupportedField for a keyword of a schema that would not bind the arguments.
    """
    marker = {} if added_ids is None else added_ids
    calls = [f"call_{index}" for index in range(len(tools))]
    rules = [f"call: {' | '.join(calls)}"]
    field = "parameters" if form is ToolFormat.LLAMA3_JSON else "arguments"
    for index, (call, tool) in enumerate(zip(calls, tools, strict=True)):
        head = f'{{"name": {json.dumps(tool.name)}, "{field}": '
        rules.append(f"{call}: {_literal(head)} arguments_{index} {_literal('}')}")
        schema = {"type": "object", **(tool.parameters or {})}  # arguments are an object whether or not it is said
        rules.append(f"arguments_{index}: %json {schema_text(schema, f'{param}[{index}]')}")
    if form is ToolFormat.HERMES:
        opening, closing = _marker("<tool_call>", marker), _marker("</tool_call>", marker)
        rules.append(f'one: {opening} "\\n" call "\\n" {closing}')
        start = 'one ("\\n" one)*' if is_parallel else "one"
    elif form is ToolFormat.MISTRAL:
        more = ' (", " call)*' if is_parallel else ""
        start = f'{_marker("[TOOL_CALLS]", marker)} "[" call{more} "]"'
    else:
        start = 'call ("; " call)*' if is_parallel else "call"
    return Grammar(GrammarKind.LARK, "\n".join([f"start: {start}", *rules]), param)


def json_or_calls(answer: Grammar, calls: Grammar) -> Grammar:
    """Return the grammar of an answer that is either JSON of a schema or what `tool_grammar` made."""
    rules = f"start: answer | calls\nanswer: %json {answer.text}\ncalls{calls.text.removeprefix('start')}"
    return Grammar(GrammarKind.LARK, rules, answer.param)


def _literal(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, added_ids: Mapping[str, int]) -> str:
    """A marker as its own token where the tokenizer has one, else as text."""
    return f"<[{added_ids[text]}]>" if text in added_ids else _literal(text)
