"""Chat templates: jinja2 in its sandbox, with limits on memory and time that the sandbox does not have.

A template comes with the model, never with a request; a hostile one costs an error, not the server.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from string import Formatter
from types import FrameType, MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from server.errors import ModelError, TemplateError, TemplateRefusal
from server.model.load.json_file import read_object
from server.model.load.tokenizer_files import read_tokenizer_files
from server.text.request_text import RequestMarkup, RequestText, added, is_of_request, joined, of_request, replaced

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 16_000_000
MAX_RENDER_S = 2.0
MAX_DEPTH = 100  # of macros within each other: a schema's depth in a real template
_MAX_WIDTH = 10_000  # of padding, indentation, ranges: 'a'|center(10**9) would take a gigabyte
_MAX_REPEATED = 100_000  # characters or items that one `*` makes; real templates repeat a dash or a space
_TEMPLATE_FILE = "<template>"  # in jinja2's compiled code of a template that is no file
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_PADDING = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill"})
_DEFAULT = "default"  # the name of a template
# Filters whose code is a method of a text, or ours. `indent` joins lines by a plain text, and adds the first to it.
_REMEMBERING = frozenset(
    {"~", "join", "replace", "safe", "string"}
    | {"capitalize", "center", "e", "escape", "lower", "trim", "truncate", "upper"}
)
_CHOOSING = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random"})  # filters that make no text
_PROBED_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))
_PROBED_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
_UNBOUNDED = frozenset(
    {"format", "format_map", "translate"}
)  # str.format is `_formatted`; no template needs the others
# What the template's own code may raise.
_FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class _Limited(Exception):
    """A limit was met while rendering."""


class ChatTemplate:
    """The templates of a model: one for all conversations, or another one for those with tools.

    Safe to use from several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """Compile the templates. Raises ModelError.

        special_tokens  bos_token, eos_token and the like, as the template names them
        tool_source     of conversations with tools; None: `source`
        """
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._template = _compiled(source)
        self._tool_template = self._template if tool_source is None else _compiled(tool_source)
        self.has_tools_of_messages = _has_tools_of_messages(self.tool_source)
        self._special_tokens = special_tokens
        self.reserved = frozenset({*_OURS, *special_tokens, *_environment().globals})  # names that no request may set
        # DeepSeek V3's, R1's and those of its distilled models write an assistant's calls, or its text, were it empty.
        has_calls = self.reads("tool_calls", has_tools=True)
        self.leaves_out_calls_beside_text = has_calls and self._writes_calls("a") is False
        # Of a template that writes them nowhere a null would be read as a text.
        self.leaves_out_calls_beside_no_text = (
            has_calls and self._writes_calls("") is False and self._writes_calls(None) is True
        )

    def _writes_calls(self, content: str | None) -> bool | None:
        """Return whether the template writes a call of an assistant's message with this text; None where it raises."""
        prompts = []
        name, given = "probed_function", {"probed_argument": 1}
        for arguments in (given, json.dumps(given)):  # some templates write objects, some texts
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
            called = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "content": "a", "tool_call_id": "call00000"}
            try:
                prompts.append(self.render([{"role": "user", "content": "a"}, called, result], tools=_PROBED_TOOLS))
            except TemplateError:
                continue
        return any(word in prompt for prompt in prompts for word in (name, *given)) if prompts else None

    def reads(self, name: str, *, has_tools: bool = False) -> bool:
        """Return whether the template of such conversations mentions a variable of this name."""
        source = self.tool_source if has_tools else self.source
        return re.search(rf"\b{re.escape(name)}\b", source) is not None

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Load a model's templates, by transformers' rules; None where it has none. Raises ModelError.

        chat_template.jinja                the default one; where a .jinja file is, tokenizer_config.json's are not read
        additional_chat_templates/*.jinja  others, of the files' names: tool_use is for conversations with tools
        tokenizer_config.json              one, or a list of named ones
        chat_template.json                 older, of a processor: where there is none of the others
        """
        files = read_tokenizer_files(folder)
        named: dict[str, str] = {}
        if (source := _read(folder / "chat_template.jinja")) is not None:
            named[_DEFAULT] = source
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = _read(path) or ""
        named = named or _named(files.config.get("chat_template"), "tokenizer_config.json")
        older = folder / "chat_template.json"
        if not named and older.is_file():
            named = _named(read_object(older).get("chat_template"), older.name)
        if not named:
            return None
        if _DEFAULT not in named:
            named[_DEFAULT] = _without_default([*named])
        return cls(named[_DEFAULT], files.named, tool_source=named.get("tool_use"))

    def control_tokens(self, texts: Collection[str]) -> frozenset[str]:
        """Return the added tokens, of `texts`, that the templates write around what a request says.

        A text or string of a template has them, or it puts them together from roles. Spaces and words are none: prose
        has them.
        """
        found = {*self._special_tokens.values()} & {*texts}
        candidates = [text for text in texts if re.search(r"[^\w\s▁]", text)]
        written = [*_literals(self.source), *_literals(self.tool_source), *self._probes()]
        return frozenset(found.union(text for text in candidates if any(text in run for run in written)))

    def _probes(self) -> Iterable[str]:
        """Yield what the templates write in small conversations around the request's texts."""
        for roles in _PROBED_ROLES:
            messages = [{"role": role, "content": RequestText("a")} for role in roles]
            for tools in (None, _PROBED_TOOLS):
                try:
                    prompt = self.render(messages, tools=tools)
                except TemplateError:
                    continue
                yield from (str.__str__(prompt)[start:end] for start, end in prompt.template_runs())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> RequestText:
        """The prompt of a conversation; `add_generation_prompt` opens the assistant's turn. Raises TemplateError.

        Its spans are those of the messages' and other values' texts that are a RequestText.

        tools, documents  None where there are none, as transformers does
        options           other variables, none of them `reserved`
        """
        given = {"messages": messages, "tools": tools, "documents": documents}
        values = {**options, **self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        try:
            with _Bounds(MAX_RENDER_S, MAX_DEPTH):
                parts, num_chars = [], 0
                template = self._tool_template if tools else self._template
                for part in template.generate(values):
                    num_chars += len(part)
                    _check_size(num_chars)
                    parts.append(part)
        except _Limited as error:
            raise TemplateError(f"The chat template was stopped: {error}.", param="messages") from error
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"The chat template refuses these messages: {error}", param="messages") from error
        except _FAILURES as error:
            detail = f"The chat template fails on these messages ({type(error).__name__})."
            raise TemplateRefusal(detail, param="messages") from error
        return joined(parts)


def _read(path: Path) -> str | None:
    """Return the file's text; None where there is no such file. Raises ModelError."""
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named(value: object, file: str) -> dict[str, str]:
    """The templates out of the forms that a file has for them: a string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    named = {}
    for entry in value if isinstance(value, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(
                f"chat_template in {file} is neither a string nor a list of objects with name and template"
            )
        named[name] = template
    return named


def _without_default(names: list[str]) -> str:
    """A template that refuses all conversations: transformers, too, takes none of the named ones for them."""
    listed = ", ".join(sorted(names)) + ("; tool_use needs tools in the request" if "tool_use" in names else "")
    message = f"this model has no default chat template, only named ones: {listed}"
    return f"{{{{ raise_exception({json.dumps(message)}) }}}}"


def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template cannot be compiled: {error}") from error


def _has_tools_of_messages(source: str) -> bool:
    """Return whether a template reads tools from a message alone, as Phi-4-mini's does."""
    is_of_message = re.search(r"""\[['"]tools['"]\]|\bmessage\.tools\b""", source) is not None
    return is_of_message and "tools" not in find_undeclared_variables(_environment().parse(source))


def _literals(source: str) -> Iterable[str]:
    """Yield a template's own texts and strings."""
    tree = _environment().parse(source)
    yield from (node.data for node in tree.find_all(nodes.TemplateData))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


class _JoinedForTildes(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` as a filter that no template can name: its size is checked, and a request's texts stay known."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "~", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the model has written, for training; here it is a scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        """Return the block's text."""
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(lambda texts: _concatenated([*texts]))  # of macros and blocks

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _JoinedForTildes().visit(super()._parse(source, name, filename))
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
        if operator == "+" and isinstance(left, str) and isinstance(right, str) and is_of_request([left, right]):
            return added(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            args = tuple([*value] if isinstance(value, Iterator) else value for value in args)  # they are read twice
            _check_text_call(owner, name, args, kwargs)
            return _of_call(owner, name, args, kwargs, super().call(__context, __obj, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and value.__name__ == "format" and not isinstance(owner, Markup):
            return partial(_formatted, owner)
        if isinstance(owner, str) and value.__name__ in ("format", "format_map"):
            raise _Limited(f"it calls {value.__name__}")
        return super().wrap_str_format(value)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=_range)
    environment.filters["tojson"] = _tojson  # jinja2's own escapes HTML, which no model was trained on
    environment.filters |= {"~": _concatenated, "string": _as_string, "safe": _safe, "join": _join}
    environment.filters.update({name: _guarded(name, each) for name, each in environment.filters.items()})
    environment.filters["format"] = _filled
    return environment


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose size is checked like that of the string method of its name; a request's text stays one."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        text = next((value for value in args if isinstance(value, str)), "")
        _check_text_call(text, name, args, kwargs)
        result = function(*args, **kwargs)
        if name in _CHOOSING:
            return result
        if isinstance(result, str) and name not in _REMEMBERING and is_of_request([*args, *kwargs.values()]):
            return RequestMarkup(str.__str__(result)) if isinstance(result, Markup) else RequestText(result)
        return _of_call(text, name, args, kwargs, result)

    return guarded


def _of_call(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The result of a call that changes text, as one of the request where a text of the request is in it."""
    if not isinstance(result, str) or is_of_request(result) or not is_of_request([text, *args, *kwargs.values()]):
        return result
    if not isinstance(result, Markup) and not kwargs:
        if name == "join":
            return joined(args[0], text)
        if name == "replace" and all(isinstance(value, str) for value in args[-2:]):
            return replaced(text, args[-2], args[-1])
    return of_request(result)


def _formatted(form: str, *args: Any, **kwargs: Any) -> str:
    """`form.format(...)` with plain fields: {}, {0} and {name}. A width could make a gigabyte of one character."""
    texts: list[str] = []
    num_unnamed = 0
    for literal, name, spec, conversion in Formatter().parse(str.__str__(form)):
        texts.append(RequestText(literal) if is_of_request(form) else literal)
        if name is None:
            continue
        if spec or conversion or not (not name or name.isdecimal() or name.isidentifier()):
            raise _Limited("it calls format with more than plain {}, {0} and {name}")
        index = int(name or num_unnamed) if not name or name.isdecimal() else None
        num_unnamed += not name
        texts.append(_written(kwargs[name] if index is None else args[index]))
    return _joined_texts(texts, "")


def _filled(form: str, *args: Any) -> str:
    """`form | format(...)` with plain places: %s, and %% for a percent sign."""
    texts: list[str] = []
    given = iter(args)
    for piece in re.split(r"(%.?)", str.__str__(form), flags=re.DOTALL):
        if piece == "%s":
            texts.append(_written(next(given, "")))
        elif piece.startswith("%") and piece != "%%":
            raise _Limited("it calls the filter format with more than plain %s")
        else:
            literal = "%" if piece == "%%" else piece
            texts.append(RequestText(literal) if is_of_request(form) else literal)
    return _joined_texts(texts, "")


def _written(value: Any) -> str:
    """The text of a value that a template puts out or joins."""
    if isinstance(value, str):
        return str(value)
    is_plain = value is None or isinstance(value, bool | int | float | Undefined)
    return str(value) if is_plain else RequestText(str(value))


def _concatenated(values: list[Any]) -> str:
    """The values as one text."""
    return _joined_texts([_written(value) for value in values], "")


def _joined_texts(texts: list[str], separator: str) -> str:
    _check_size(sum(map(len, texts)) + len(texts) * len(separator))
    return joined(texts, separator) if is_of_request([separator, *texts]) else separator.join(texts)


def _as_string(value: Any) -> str:
    return value if isinstance(value, str) else _written(value)


def _safe(value: Any) -> Markup:
    """A text as markup: jinja2 escapes what is added to it."""
    return RequestMarkup(value) if isinstance(value, RequestText) else Markup(value)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _joined_texts([_written(item) for item in items], _written(d))


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
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if not 0 <= width <= 16:
        raise _Limited(f"tojson indents by {width}, the limit is 16")
    if separators is not None and _text_size(separators) > 16:
        raise _Limited("tojson separates by more than 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    now = datetime.now().astimezone().strftime(form)
    return RequestText(now) if isinstance(form, RequestText) else now


class _Bounds:
    """Limits in seconds and in depth on this thread's Python code: a loop without output cannot be ended otherwise.

    By the interpreter's trace function, which sees each line of the template and each call: without the lines of the
    library a chat of one message renders in 49 us instead of 80 (two shared cores). The interpreter's own limit on
    depth is the process's: where a library raised it to some 20,000, endless recursion overflowed the stack.
    """

    def __init__(self, seconds: float, max_depth: int) -> None:
        self._seconds = seconds
        self._max_depth = max_depth  # of macros and recursive loops within each other
        self._depth = 0

    def __enter__(self) -> None:
        self._outer = sys.gettrace()
        self._end = time.monotonic() + self._seconds
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if time.monotonic() > self._end:
            raise _Limited(f"it ran for more than {self._seconds:g} s")
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if event == "call":
            self._depth += 1
            if self._depth > self._max_depth:
                raise _Limited(f"its macros or loops are nested more than {self._max_depth} deep")
        elif event == "return":
            self._depth -= 1
        return self._trace
