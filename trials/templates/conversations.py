"""Conversations as clients send them, with what templates go wrong on: tools, parts, empty texts, markup, marks."""

from typing import Any

Messages = list[dict[str, Any]]


def _call(arguments: str, name: str = "weather", number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def _result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number:05}", "content": content}


_SYSTEM = {"role": "system", "content": "Be brief."}
_TAGS = {"type": "array", "items": {"type": "string", "enum": ["<", ">", "<b>&amp;'\""]}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <b>city</b> & more, 'é' and \"quotes\".",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "München"}, "tags": _TAGS},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
# Calls that a template may render in a message; a text that could be of another type, and one with marks.
# Mistral's templates take ids of nine letters and digits.
CALLS = [
    {**_call(arguments, name), "id": f"call{number:05}"}
    for number, (name, arguments) in enumerate(
        (
            ("weather", '{"city": "12", "tags": ["<", "<b>&amp;\'\\""]}'),
            ("now", "{}"),
            ("weather", '{"city": "Zürich <b>\\nor \\"Bern\\""}'),
        )
    )
]
_HI = _user("Hi")
_CALLED = _assistant("", tool_calls=[_call('{"city": "Bern", "tags": ["<", "\\\\udc00"]}')])
CONVERSATIONS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "user": ([_HI], None),
    "system": ([_SYSTEM, _HI], None),
    "turns": ([_SYSTEM, _HI, _assistant("Yes"), _user("Go")], None),
    "tools": ([_SYSTEM, _user("Weather?")], TOOLS),
    "tools without system": ([_user("Weather?")], TOOLS),
    "call": ([_HI, _CALLED, _result("Rain <b>&amp;</b>")], TOOLS),
    "call with text": ([_HI, {**_CALLED, "content": "I look."}, _result("Rain"), _user("And?")], TOOLS),
    "two calls": (
        [_HI, _assistant("", tool_calls=[_call("{}", number=i) for i in (0, 1)]), _result("a"), _result("b", 1)],
        TOOLS,
    ),
    "call without content": ([_HI, {**_CALLED, "content": None}, _result("Rain")], TOOLS),
    "call without tools": ([_HI, _CALLED, _result("Rain")], None),
    "reasoning": ([_HI, _assistant("Yes", reasoning_content="Think <b>."), _user("Go")], None),
    "reasoning in text": ([_HI, _assistant("<think>\nA & b\n</think>\n\nYes"), _user("Go")], None),
    "reasoning and call": ([_HI, {**_CALLED, "reasoning_content": "Look."}, _result("Rain")], TOOLS),
    "parts": ([_user([{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}])], None),
    "empty texts": ([{"role": "system", "content": ""}, _user(""), _assistant(""), _user("Go")], None),
    "spaces": ([_user("  two\n\n  lines \n"), _assistant("\n Yes \n"), _user("\tGo ")], None),
    "unicode": (
        [{"role": "system", "content": "日本語"}, _user("é 😀 \u200d\u2028 ﷺ"), _assistant("Ω"), _user("ß")],
        TOOLS,
    ),
    "markup": ([{"role": "system", "content": "<b>&amp;</b>"}, _user("<script>\"'&lt;")], TOOLS),
    "escapes": ([_user("\\udc00 \\n {{ 1 }} {% raw %} %s {0}"), _assistant("\\udc00"), _user("\\ud83d")], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, _HI], None),
    "system later": ([_SYSTEM, _HI, _assistant("Yes"), {"role": "system", "content": "Now long."}, _user("Go")], None),
}
