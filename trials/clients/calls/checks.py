"""Common parts of the scripts: a line of output for each call, and checks of the answers.

The demo model's answers are made up; `expect` is about their form. A script ends with 1 when a call failed.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL = os.environ["HALLMARK_URL"]
BASE_URL = f"{URL}/v1"
EMBED_URL = f"{os.environ.get('HALLMARK_EMBED_URL', URL)}/v1"  # of a server for embeddings
MODEL = "demo"
TOKENIZER = os.environ["TOKENIZER"]  # a folder with tokenizer.json
FOLDER = os.environ["CLIENT_FOLDER"]  # the client's own, to write into
ASK = [{"role": "user", "content": "Tell me about the forest."}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER},
}

_failed: list[str] = []


def expect(is_so: object, what: str) -> None:
    """Raise AssertionError with `what`, unless it is so."""
    if not is_so:
        raise AssertionError(what)


def is_streamed(parts: list[str]) -> bool:
    """Return whether a text came in several parts. Ask again where not: the demo's may be one word, as "No." is."""
    return len(parts) > 1 and bool("".join(parts).strip())


def expect_weather(arguments: str | dict[str, Any]) -> None:
    """Arguments of the tool, as text or parsed, must validate against its schema."""
    found = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    expect(found.keys() == {"city", "unit"}, f"arguments are city and unit, not {sorted(found)}")
    for name, value in found.items():
        expect(value in WEATHER["properties"][name]["enum"], f"{name} is one of the enum, not {value!r}")


def call(name: str, function: Callable[[], Any]) -> None:
    """Make a call of the client, a coroutine perhaps, and report it."""
    why = None
    try:
        found = function()
        if inspect.isawaitable(found):
            asyncio.run(_waited(found))
    except Exception as error:  # any that a client may raise is a result of this test
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        _failed.append(name)
    print("\n" + json.dumps({"call": name, "why": why}), flush=True)  # the client may have left a line unfinished


async def _waited(found: Any) -> None:
    await found


def end() -> None:
    """End the script with its verdict."""
    sys.exit(1 if _failed else 0)
