"""Tools, calls and texts that are drawn: names of every letter that is allowed, and hostile strings."""

import json
import random
import string
from collections.abc import Mapping
from typing import Any

Call = tuple[str, dict[str, Any]]
ToolSchemas = dict[str, dict[str, Any]]
_NESTED = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}
_PROPERTIES: Mapping[str, Any] = {
    "text": {"type": "string"},
    "zip-code": {"type": "string"},
    "from": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "none": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "names": {"type": "array", "items": {"type": "string"}},
    "them": {"type": "array", "items": _NESTED},
    "it": _NESTED,
}
_PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "</invoke>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>", "</tool_calls>", "<tool_calls>"),
    *("<invoke name=\"", "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call|>", "functools["),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "```", ">>>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>", "</TOOLCALL>"),
    *("<think>", "</think>", "<response>", "</response>", "[THINK]", "[/THINK]", "[ARGS]", "<", "</", "<|", ">"),
    *('<|"|>', "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    *('"', "'", "\\", "{", "}", "[", "]", "(", ")", ":", ",", "=", "\n", "\r\n", "\t", " ", "\u2028", "\x00"),
    *("a", "é", "😀", "42", "null", "None", "true", '\\"', "', ", '")', '"}', "'}", "x(", '{"name": "a"}'),
]  # fmt: skip


def drawn_text(chance: random.Random, *unwritable: str, num_pieces: int = 7) -> str:
    """A hostile text without some, and without what only together makes one of them."""
    while True:
        text = "".join(chance.choices(_PIECES, k=chance.randrange(num_pieces)))
        if not any(bad in text for bad in unwritable):
            return text


def drawn_tools(chance: random.Random) -> ToolSchemas:
    """One tool without arguments and two with many, of drawn names."""
    letters = string.ascii_letters + string.digits + "_.:/-"

    def name() -> str:
        return chance.choice(string.ascii_letters) + "".join(chance.choices(letters, k=chance.randrange(12)))

    schemas: list[dict[str, Any]] = [{}, {"type": "object", "properties": _PROPERTIES}, {"properties": _PROPERTIES}]
    return dict(zip((f"{name()}{number}" for number in range(3)), schemas, strict=True))


def drawn_calls(chance: random.Random, tools: ToolSchemas, *unwritable: str, never: tuple[str, ...] = ()) -> list[Call]:
    """Up to three calls; strings that are arguments themselves are without some texts, nested ones without `never`."""
    unwritable = (*unwritable, *never)

    def integer() -> int:
        return chance.choice([0, -7, 42, 2**53 + 1, -(10**30)])

    def nested() -> dict[str, Any]:
        return {"n": integer()} | ({"s": drawn_text(chance, *never)} if chance.random() < 0.7 else {})

    def texts() -> list[str]:
        return [drawn_text(chance, *never) for _ in range(chance.randrange(3))]

    def arguments() -> dict[str, Any]:
        found: dict[str, Any] = {
            "text": chance.choice([drawn_text(chance, *unwritable), "5", "true", "null", "", "[1]", " a\n"]),
            "zip-code": drawn_text(chance, *unwritable),
            "from": texts(),
            "n": integer(),
            "x": chance.choice([0.5, -1e-7, 1e22, 3, 2**60 + 1]),
            "yes": chance.random() < 0.5,
            "none": chance.choice([None, 5]),
            "names": texts(),
            "them": [nested() for _ in range(chance.randrange(3))],
            "it": nested(),
        }
        return {name: found[name] for name in chance.sample([*found], k=chance.randrange(5))}

    names = [chance.choice([*tools]) for _ in range(chance.choice([0, 1, 1, 2, 3]))]
    return [(name, arguments() if tools[name] else {}) for name in names]


def dumped(value: object, chance: random.Random) -> str:
    """JSON as models write it: with spaces or not, in lines or not, escaped or not."""
    form: Any = chance.choice([{}, {"indent": 2}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}])
    return json.dumps(value, ensure_ascii=chance.random() < 0.5, **form)
