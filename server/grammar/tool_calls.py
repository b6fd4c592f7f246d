"""Grammars of answers that must call a tool, in the form in which a model writes calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.grammar.native_calls import GemmaArguments, NotBindable, PythonArguments, TaggedArguments
from server.grammar.rules import Rules
from server.grammar.schema import schema_text
from server.protocol.messages import Grammar
from server.settings import ToolCallParser
from server.text.answer.formats import FORMATS, Shape
from server.text.answer.forms.call_array import ArrayMarks
from server.text.answer.forms.functionary import NEXT
from server.text.answer.forms.gemma import CLOSES as GEMMA_CLOSES
from server.text.answer.forms.gemma import OPENS as GEMMA_OPENS
from server.text.answer.forms.harmony import CHANNEL, CONSTRAIN, MESSAGE
from server.text.answer.forms.harmony import MARKS as HARMONY_MARKS
from server.text.answer.forms.hermes import CLOSES, OPENS
from server.text.answer.forms.marked import Marks
from server.text.answer.forms.mistral import ARGS, CALLS
from server.text.answer.forms.pythonic import PythonMarks
from server.text.answer.forms.tagged import TaggedCalls
from server.text.answer.texts.values import inlined

_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
_FINAL = f"{CHANNEL}final{MESSAGE}"  # opens harmony's answers


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call.

    parameters  JSON schema of its arguments, an object whether or not it says so; None or empty: there are none
    """

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class BoundCalls:
    """A grammar of calls, and the form in which it has them."""

    grammar: Grammar
    form: ToolCallParser


def bound_calls(
    tools: Sequence[Tool],
    form: ToolCallParser,
    *,
    is_parallel: bool = False,
    added_ids: Mapping[str, int] | None = None,
    answer: Grammar | None = None,
    param: str = "tools",
) -> BoundCalls:
    """Return the grammar of an answer that is a call of one of `tools`, at least one, and nothing else.

    tools        all of a request for tool_choice "required", the one that is named for a named one
    form         of the model; one without JSON becomes HERMES, where it has Hermes's marks, or LLAMA3_JSON for a tool
                 with an argument that it cannot bind: between tags strings with a pattern, a format, or beside numbers
                 in one type, in GEMMA these and recursive types
    is_parallel  whether several calls may follow one another; harmony ends an answer with its first
    added_ids    ids of the tokenizer's added tokens by their text: a marker such as <tool_call> may be one
    answer       a grammar of JSON, which the answer may be in place of a call
    param        the field that the schemas are of
    Raises UnsupportedField for a keyword of a schema that would not bind the arguments.
    """
    schemas = [_schema_text(tool, f"{param}[{index}]") for index, tool in enumerate(tools)]  # refuses before all else
    try:
        rules = Rules(added_ids or {})
        calls = _calls(rules, tools, schemas, form, is_parallel=is_parallel)
    except NotBindable:
        form, rules = _in_json(FORMATS[form].shape), Rules(added_ids or {})
        calls = _calls(rules, tools, schemas, form, is_parallel=is_parallel)
    if answer is None:
        return BoundCalls(rules.grammar("start", calls, param), form)
    head = rules.sequence(_FINAL, HARMONY_MARKS) if form is ToolCallParser.HARMONY else ""
    start = f"{head} {rules.json(answer.text)} | {rules.rule(calls)}"
    return BoundCalls(rules.grammar("start", start, answer.param), form)


def _in_json(shape: Shape) -> ToolCallParser:
    """Return the form that binds a call whose values a model's own form cannot bind: objects, as JSON has them."""
    is_hermes = isinstance(shape, TaggedCalls) and any(OPENS in (it.section[0], it.call[0]) for it in shape.forms)
    return ToolCallParser.HERMES if is_hermes else ToolCallParser.LLAMA3_JSON


def _schema_text(tool: Tool, param: str) -> str:
    return schema_text({**(tool.parameters or _NO_PARAMETERS), "type": "object"}, param)


def _calls(
    rules: Rules, tools: Sequence[Tool], schemas: Sequence[str], form: ToolCallParser, *, is_parallel: bool
) -> str:
    both = [*zip(tools, schemas, strict=True)]
    if form is ToolCallParser.HERMES:
        call = _one_of(rules, [_object(rules, tool, schema, "arguments") for tool, schema in both])
        one = rules.rule(f'{_mark(rules, OPENS)} "\\n" {call} "\\n" {_mark(rules, CLOSES)}')
        return _several(one, '"\\n"', is_parallel)
    match FORMATS[form].shape:
        case TaggedCalls(forms):
            tags = next((it for it in forms if rules.has_token(it.section[0] or it.call[0])), forms[-1])
            tagged = TaggedArguments(rules, tags)
            bodies = [tagged.call(tool.name, inlined(tool.parameters or {})) for tool in tools]
            return tagged.calls(bodies, is_parallel=is_parallel)
        case Marks() as marks:
            return _marked(rules, marks, both, is_parallel=is_parallel)
        case ArrayMarks() as marks:
            array = _array(rules, marks, both, is_parallel=is_parallel)
            written = (f"{_mark(rules, before)} {array} {_mark(rules, behind)}" for before, behind in marks.pairs)
            return _one_of(rules, [*written])
        case PythonMarks() as marks:
            python = PythonArguments(rules)
            call = _one_of(rules, [python.call(tool.name, inlined(tool.parameters or {})) for tool in tools])
            opening, closing = marks.marks or ("", "")
            calls = _several(call, rules.literal(", " if marks.has_brackets else "\n"), is_parallel)
            listed = f'"[" {calls} "]"' if marks.has_brackets else calls
            return f"{_mark(rules, opening)} {listed} {_mark(rules, closing)}"
    if form is ToolCallParser.FUNCTIONARY_V32:
        call = _one_of(rules, [f"{rules.literal(f'{tool.name}{chr(10)}')} {rules.json(it)}" for tool, it in both])
        return _several(call, rules.literal(NEXT), is_parallel)
    if form is ToolCallParser.GEMMA:
        braces = GemmaArguments(rules)
        call = _one_of(rules, [braces.call(tool.name, inlined(tool.parameters or {})) for tool in tools])
        one = rules.rule(f"{_mark(rules, GEMMA_OPENS)} {call} {_mark(rules, GEMMA_CLOSES)}")
        return _several(one, "", is_parallel)
    if form is ToolCallParser.HARMONY:  # <|call|>, which ends the call, ends the answer, too
        return _one_of(rules, [_harmony(rules, tool, schema) for tool, schema in both])
    if form is ToolCallParser.MISTRAL and rules.has_token(ARGS):
        named = [rules.sequence(f"{CALLS}{tool.name}{ARGS}", (CALLS, ARGS)) + " " + rules.json(it) for tool, it in both]
        return _several(_one_of(rules, named), "", is_parallel)
    if form is ToolCallParser.MISTRAL:
        call = _one_of(rules, [_object(rules, tool, schema, "arguments") for tool, schema in both])
        return f'{_mark(rules, CALLS)} "[" {_several(call, rules.literal(", "), is_parallel)} "]"'
    call = _one_of(rules, [_object(rules, tool, schema, "parameters") for tool, schema in both])
    return _several(call, rules.literal("; "), is_parallel)


def _array(rules: Rules, marks: ArrayMarks, both: Sequence[tuple[Tool, str]], *, is_parallel: bool) -> str:
    """An array of calls as a model of these marks writes it."""
    opening = "" if marks.number else "{"
    bodies = [_object(rules, tool, schema, marks.arguments, name=marks.name, opening=opening) for tool, schema in both]
    call = _one_of(rules, bodies)
    if marks.number:
        head = rules.literal(f'{{"{marks.number}": "')
        call = rules.rule(f"{head} {rules.terminal('/[0-9]{1,3}/')} {rules.literal(chr(34) + ', ')} {call}")
    indent, end = ("\n    ", "\n") if marks.is_indented else ("", "")
    between = rules.literal(f",{indent or ' '}")
    return rules.rule(
        f"{rules.literal(f'[{indent}')} {_several(call, between, is_parallel)} {rules.literal(f'{end}]')}"
    )


def _object(rules: Rules, tool: Tool, schema: str, field: str, *, name: str = "name", opening: str = "{") -> str:
    head = f'{opening}"{name}": {json.dumps(tool.name)}, "{field}": '
    return f"{rules.literal(head)} {rules.json(schema)} {rules.literal('}')}"


def _harmony(rules: Rules, tool: Tool, schema: str) -> str:
    """A call as gpt-oss writes it, the recipient behind the channel, or before it, as its template does."""
    to = f" to=functions.{tool.name}"
    heads = (f"{CHANNEL}commentary{to} {CONSTRAIN}json{MESSAGE}", f"{to}{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}")
    written = (rules.sequence(head, HARMONY_MARKS) for head in (*heads, f"{to}{CHANNEL}commentary json{MESSAGE}"))
    return f"({' | '.join(written)}) {rules.json(schema)}"


def _marked(rules: Rules, marks: Marks, both: Sequence[tuple[Tool, str]], *, is_parallel: bool) -> str:
    """Calls with their name before their arguments, as a model of these marks writes them."""
    bodies = []
    for tool, schema in both:
        before, number, behind = f"{marks.call[0]}{marks.written}".replace("{name}", tool.name).partition("{number}")
        head = rules.sequence(before, marks.marks)
        if number:
            head = f"{head} {rules.terminal('/[0-9]{1,3}/')} {rules.sequence(behind, marks.marks)}"
        bodies.append(f"{head} {rules.json(schema)} {rules.sequence(f'{marks.tail}{marks.call[1]}', marks.marks)}")
    between = rules.literal(marks.between) if marks.between else ""
    calls = _several(_one_of(rules, bodies), between, is_parallel)
    return f"{_mark(rules, marks.section[0])} {calls} {_mark(rules, marks.section[1])}"


def _one_of(rules: Rules, bodies: Sequence[str]) -> str:
    return rules.rule(" | ".join(rules.rule(body) for body in bodies))


def _several(one: str, between: str, is_parallel: bool) -> str:
    return f"{one} ({between} {one})*" if is_parallel else one


def _mark(rules: Rules, text: str) -> str:
    return rules.sequence(text, (text,))
