"""Chat templates: jinja2 in its sandbox, with limits on memory and time that the sandbox does not have.

A template comes with the model, never with a request; a hostile one costs an error, not the server.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from server.errors import ModelError, TemplateError
from server.model.load.tokenizer_files import read_tokenizer_files
from server.text.special_tokens import MARK

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 16_000_000
MAX_RENDER_S = 2.0
_MAX_WIDTH = 10_000  # of padding, indentation, ranges: 'a'|center(10**9) would take a gigabyte
_MAX_REPEATED = 100_000  # characters or items that one `*` makes; real templates repeat a dash or a space
_TEMPLATE_FILE = "<template>"  # in jinja2's compiled code of a template that is no file
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_PADDING = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill"})
_UNBOUNDED = frozenset({"format", "format_map", "translate"})  # no template needs them
# What the template's own code may raise; RuntimeError is endless recursion.
_FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class _Limited(Exception):
    """A limit was met while rendering."""


class ChatTemplate:
    """Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token and the like, as the template names them. Raises ModelError."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error
        self.source = source
        self._special_tokens = special_tokens
        self.reserved = frozenset({*_OURS, *special_tokens, *_environment().globals})  # names that no request may set

    def reads(self, name: str) -> bool:
        """Return whether the template mentions a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Load chat_template.jinja, else tokenizer_config.json's; None where there is neither. Raises ModelError."""
        files = read_tokenizer_files(folder)
        source = _read(folder / "chat_template.jinja")
        if source is None:
            source = _default(files.config.get("chat_template"))
        return None if source is None else cls(source, dict(files.named))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt of a conversation; `add_generation_prompt` opens the assistant's turn. Raises TemplateError.

        tools, documents  None where there are none, as transformers does
        options           other variables, none of them `reserved`
        """
        given = {"messages": messages, "tools": tools, "documents": documents}
        values = {**options, **self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        try:
            with _Deadline(MAX_RENDER_S):
                parts, num_chars = [], 0
                for part in self._template.generate(values):
                    num_chars += len(part)
                    _check_size(num_chars)
                    parts.append(part)
        except _Limited as error:
            raise TemplateError(f"The chat template was stopped: {error}.", param="messages") from error
        except jinja2.TemplateError as error:
            said = str(error).replace(MARK, "")  # it may quote a message
            raise TemplateError(f"The chat template refuses these messages: {said}", param="messages") from error
        except _FAILURES as error:
            detail = f"The chat template fails on these messages ({type(error).__name__})."
            raise TemplateError(detail, param="messages") from error
        return "".join(parts)


def _read(path: Path) -> str | None:
    """Return the file's text; None where there is no such file. Raises ModelError."""
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _default(value: object) -> str | None:
    """The template out of the forms that tokenizer_config.json has for it: a string, or a list of named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError("chat_template in tokenizer_config.json is neither a string nor a list with a 'default'")
    return value


class _SumsForTildes(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` as a sum of strings, so that its size is checked like any other sum's."""
        self.generic_visit(node)
        texts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes
        ]
        return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), texts)


class _Generation(Extension):
    """`{% generation %}` marks what the model has written, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _SumsForTildes().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise _Limited("it uses **")
        if operator == "*":
            num_repeated = _size(left) * _size(right) if _is_sized(left) or _is_sized(right) else 0
            if num_repeated > _MAX_REPEATED:
                raise _Limited(f"it repeats to {num_repeated} items, the limit is {_MAX_REPEATED}")
        if operator == "+" and _is_sized(left) and _is_sized(right):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            raise _Limited("it formats a string with %")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_call(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if isinstance(getattr(value, "__self__", None), str) and value.__name__ in ("format", "format_map"):
            raise _Limited(f"it calls {value.__name__}")
        return super().wrap_str_format(value)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=_range)
    environment.filters["tojson"] = _tojson  # jinja2's own escapes HTML, which no model was trained on
    environment.filters.update({name: _guarded(name, each) for name, each in environment.filters.items()})
    return environment


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose size is checked like that of the string method of its name."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        text = next((value for value in args if isinstance(value, str)), "")
        _check_text_call(text, name, args, kwargs)
        return function(*args, **kwargs)

    return guarded


def _check_text_call(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises _Limited for a call that could make far more text than it was given, or was given too much."""
    if name in _UNBOUNDED:
        raise _Limited(f"it calls {name}")
    given = (*args, *kwargs.values())
    size = len(text) + sum(_text_size(value) for value in given if value is not text)
    if name in _PADDING:
        width = max((value for value in given if isinstance(value, int)), default=0)
        if width > _MAX_WIDTH:
            raise _Limited(f"{name} with {width}, the limit is {_MAX_WIDTH}")
        size += width * (1 + text.count("\n") + text.count("\t"))
    if name in ("replace", "join"):
        longest = max((len(value) for value in given if isinstance(value, str) and value is not text), default=0)
        num_places = max((len(value) for value in (text, *args) if _is_sized(value)), default=0) + 1
        size += num_places * max(longest, len(text) if name == "join" else 1)
    _check_size(size)


def _text_size(value: Any) -> int:
    """Characters of a text, or of all texts in a collection, however deep: one text may be in it many times."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_size(key) + _text_size(item) for key, item in value.items())
    return sum(map(_text_size, value)) if isinstance(value, list | tuple) else 0


def _is_sized(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _size(value: Any) -> int:
    return len(value) if _is_sized(value) else int(value)


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise _Limited(f"it makes {size} characters, the limit is {MAX_OUTPUT_CHARS}")


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _MAX_WIDTH:
        raise _Limited(f"a range of {len(numbers)}, the limit is {_MAX_WIDTH}")
    return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise _Limited(f"tojson indents by {indent}, the limit is 16")
    if separators is not None and _text_size(separators) > 16:
        raise _Limited("tojson separates by more than 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class _Deadline:
    """Limit in seconds on this thread's Python code: a loop without output cannot be ended otherwise.

    By the interpreter's trace function, which sees each line of the template and each call: without the lines of the
    library a chat of one message renders in 49 us instead of 80 (two shared cores).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._outer = sys.gettrace()
        self._end = time.monotonic() + self._seconds
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if time.monotonic() > self._end:
            raise _Limited(f"it ran for more than {self._seconds:g} s")
        return self._trace if frame.f_code.co_filename == _TEMPLATE_FILE else None
