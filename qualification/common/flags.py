"""Types of flags, which raise ArgumentTypeError for argparse to print, and the form of a help."""

import argparse
import math
import textwrap
from typing import Any, TypeAlias, TypeVar

# torch's names of dtypes, as vLLM's --dtype takes them, and ours.
DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}

Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # of a program
ParserType = TypeVar("ParserType", bound=argparse.ArgumentParser)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def positive(text: str) -> float:
    """Neither zero nor NaN nor infinite: nothing would ever be sent, or be too late."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def dtype_name(text: str) -> str:
    """Return our name of a dtype; what is none stays for `choices` to refuse."""
    return DTYPE_NAMES.get(text, text)


def shard(text: str) -> tuple[int, int]:
    """I/N as (place from 0, number of shards)."""
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return int(index) - 1, int(number)


def add_command(
    commands: "argparse._SubParsersAction[ParserType]", name: str, summary: str, sentence: str, *examples: str
) -> ParserType:
    """Add a command: `summary` stands in the list of commands, sentence and examples in its own help."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(sentence, 100),
        epilog="\n  ".join(["examples:" if len(examples) > 1 else "example:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
