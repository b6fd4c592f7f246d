"""Grammars of calls whose arguments are no JSON object: tags, the braces of Gemma 4, Python's calls.

They take what tagged.py, gemma.py and pythonic.py of server/text/answer/forms read, so that a value comes out with the
type of its schema. Schemas are those that `inlined` has made: without references, but for recursive ones.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.grammar.rules import Rules
from server.grammar.schema import schema_text
from server.text.answer.forms.gemma import CALL, QUOTE
from server.text.answer.forms.tagged import Lines, Tags
from server.text.answer.texts.values import types_of

_NAME = re.compile(r"[\w.$-]+")  # of a field that needs no quotes
_STRING, _NULL = frozenset({"string"}), frozenset({"null"})
_LENGTH = ("minLength", "maxLength")
# What bare text cannot follow, or what the readers of bare text do not look into.
_UNBOUND = ("pattern", "format", "allOf", "oneOf", "$ref")
_UNBOUND_OBJECT = (
    *("patternProperties", "minProperties", "maxProperties", "enum", "const"),
    *("anyOf", "oneOf", "allOf", "$ref"),
)
_UNBOUND_ARRAY = ("prefixItems", "additionalItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_MAX_DEPTH = 16
_ANY_BARE = {"type": ["number", "boolean", "null"]}
_KEY = r"/[A-Za-z_]\w{0,31}/"  # of an object whose schema names no fields


class NotBindable(Exception):
    """A form cannot bind a value of this schema."""


class TaggedArguments:
    """A call between tags, with those of each argument in the order of the schema."""

    def __init__(self, rules: Rules, tags: Tags) -> None:
        self._rules = rules
        self._tags = tags

    def calls(self, bodies: Sequence[str], *, is_parallel: bool) -> str:
        """Return the body of a rule for one call, or for several, with their sections."""
        opening, closing = self._tags.section
        one = self._rules.rule(" | ".join(map(self._rules.rule, bodies)))
        more = f"({self.lines('', '')} {one})*" if is_parallel else ""
        if not opening:
            return f"{one} {more}"
        if self._tags.is_shared:
            return f"{self.lines(opening, '')} {one} {more} {self.lines('', closing)}"
        whole = self._rules.rule(f"{self.lines(opening, '')} {one} {self.lines('', closing)}")
        return f"{whole} ({self.lines('', '')} {whole})*" if is_parallel else whole

    def call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a rule for a call without its section. Raises NotBindable."""
        properties, required = _fields_of(schema)
        if isinstance(schema.get("additionalProperties"), Mapping):
            raise NotBindable
        opening, behind, closing = self._tags.call
        parts = [self.lines(f"{opening}{name}{behind}", "")]
        for key, value in properties.items():
            part = self._rules.rule(f"{self._argument(key, value)} {self.lines('', '')}")
            parts.append(f"{part}{'' if key in required else '?'}")
        return " ".join([*parts, self.lines(closing)])

    def _argument(self, key: str, schema: Any) -> str:
        """Return an argument: its key, which may say whether a string follows, its value and the mark behind it."""
        values = [*self._values(schema)]
        if not self._tags.says_string:
            return f"{self._head(key)} ({' | '.join(body for _, body in values)})"
        written = (
            f"{self._head(f'{key}{self._tags.says_string}{json.dumps(is_string)}')} {body}"
            for is_string, body in values
        )
        return f"({' | '.join(written)})"

    def _head(self, key: str) -> str:
        """Return what stands before a value."""
        (key_opens, key_closes), value_opens = self._tags.key, self._tags.value[0]
        named, pad = f"{key_opens}{key}{key_closes}", "\n" if self._tags.is_padded else ""
        return self.lines(named, f"{value_opens}{pad}") if value_opens else self.lines(f"{named}{pad}")

    def lines(self, *texts: str) -> str:
        """Return texts with the line breaks of the form between them."""
        between = {Lines.ALL: ' "\\n" ', Lines.EITHER: ' "\\n"? ', Lines.NONE: " "}[self._tags.lines]
        return between.join(self._sequence(text) for text in texts)

    def _sequence(self, text: str) -> str:
        return self._rules.sequence(text, self._tags.marks)

    def _values(self, schema: Any) -> Iterator[tuple[bool, str]]:
        """Yield values, whether they are strings, and the mark behind them: the lexer sees both at once."""
        types = types_of(schema)
        closing = f"{chr(10) if self._tags.is_padded else ''}{self._tags.value[1]}"
        if "string" not in types:
            yield False, f"{self._rules.json(schema_text(schema, ''))} {self._sequence(closing)}"
            return
        texts, length = _strings_of(schema, types)
        avoided = self._tags.ends_of_value
        if texts is None:
            yield True, self._rules.text_until(closing, self._tags.marks, avoided=avoided, body=f"(?s:.{length})")
            texts = ["null"] if "null" in types else []
        elif any(mark in text for text in texts for mark in avoided):
            raise NotBindable
        for text in texts:
            is_string = text != "null" or "null" not in types
            yield is_string, f"{self._rules.literal(text) if text else ''} {self._sequence(closing)}"


class PythonArguments:
    """NAME(KEY=VALUE, ...): values are JSON, but for Python's True, False and None."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a rule for a call. Raises NotBindable."""
        properties, required = _fields_of(schema)
        if isinstance(schema.get("additionalProperties"), Mapping):
            raise NotBindable
        literal = self._rules.literal
        fields = [(f"{literal(f'{key}=')} {self._value(value)}", key in required) for key, value in properties.items()]
        arguments = _in_order(self._rules, fields, literal(", "), literal(")"))
        return f"{literal(f'{name}(')} {arguments}"

    def _value(self, schema: Any) -> str:
        if branch := _beside_null(schema):
            return self._rules.rule(f'{self._value(branch)} | "None"')
        if isinstance(schema, Mapping) and schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
            return self._rules.rule('"True" | "False"')
        return self._rules.json(schema_text(schema, ""))


class GemmaArguments:
    """call:NAME{KEY:VALUE,...}, strings between <|"|>, the rest bare; objects and arrays likewise within."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._quote = rules.sequence(QUOTE, (QUOTE,))
        self._any_value = ""  # its rule, once it is needed

    def call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a rule for a call. Raises NotBindable."""
        arguments = self._object(schema, 0) if schema else '"{}"'
        return f"{self._rules.literal(f'{CALL}{name}')} {arguments}"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = _fields_of(schema)
        more = schema.get("additionalProperties")
        if not properties and (isinstance(more, Mapping) or (more is not False and "properties" not in schema)):
            pair = self._pair(self._value(more, depth + 1) if isinstance(more, Mapping) else self._any())
            return self._rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        if isinstance(more, Mapping):
            raise NotBindable
        fields = [
            (f"{self._rules.literal(f'{key}:')} {self._value(value, depth + 1)}", key in required)
            for key, value in properties.items()
        ]
        rest = _in_order(self._rules, fields, '","', '"}"')
        return self._rules.rule(f'"{{" {rest}')

    def _value(self, schema: Any, depth: int) -> str:
        types = types_of(schema)
        if depth > _MAX_DEPTH:
            raise NotBindable
        if "string" in types:
            return self._text(schema, types)
        if branch := _beside_null(schema):
            return self._rules.rule(f'{self._value(branch, depth + 1)} | "null"')
        if types == {"object"}:
            return self._object(schema, depth)
        if types == {"array"}:
            return self._array(schema, depth)
        if types & {"object", "array"}:
            raise NotBindable
        return self._rules.json(schema_text(schema, ""))

    def _text(self, schema: Any, types: frozenset[str]) -> str:
        texts, length = _strings_of(schema, types)
        null = ' | "null"' if "null" in types else ""
        if texts is None:
            text = self._rules.text_until(QUOTE, (QUOTE,), body=f"(?s:.{length})")
            return self._rules.rule(f"{self._quote} {text}{null}")
        if any(QUOTE in text for text in texts):
            raise NotBindable
        quoted = (f"{self._quote} {self._rules.literal(text) if text else ''} {self._quote}" for text in texts)
        return self._rules.rule(" | ".join(quoted))

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        if any(name in schema for name in _UNBOUND_ARRAY):
            raise NotBindable
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < max(fewest, 1):
            raise NotBindable
        items = schema.get("items")
        item = self._any() if items is None else self._value(items, depth + 1)
        last = "" if most is None else most - 1
        more = "" if most == 1 else f'("," {item}){{{max(fewest - 1, 0)},{last}}}'  # {0,0} is refused
        some = f'"[" {item} {more} "]"'
        return self._rules.rule(some if fewest else f'{some} | "[]"')

    def _any(self) -> str:
        """A value of which no schema says anything."""
        if not self._any_value:
            text = f"{self._quote} {self._rules.text_until(QUOTE, (QUOTE,))}"
            bare = self._rules.json(schema_text(_ANY_BARE, ""))

            def body(name: str) -> str:
                pair = self._pair(name)
                return f'{text} | {bare} | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'

            self._any_value = self._rules.recursive(body)
        return self._any_value

    def _pair(self, value: str) -> str:
        return f'{self._rules.terminal(_KEY)} ":" {value}'


def _in_order(rules: Rules, fields: Sequence[tuple[str, bool]], between: str, closing: str) -> str:
    """Return the name of a rule for fields, of which some are required, in their order, and what closes them."""
    after = first = closing  # what may follow where a field stands before, and where none does
    for body, is_required in reversed(fields):
        field = rules.rule(body)
        first = rules.rule(f"{field} {after}" if is_required else f"{field} {after} | {first}")
        after = rules.rule(f"{between} {field} {after}" if is_required else f"{between} {field} {after} | {after}")
    return first


def _fields_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The fields of an object's schema, and which of them it requires. Raises NotBindable."""
    properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
    if any(name in schema for name in _UNBOUND_OBJECT) or not isinstance(properties, Mapping):
        raise NotBindable
    if not required <= properties.keys() or not all(_NAME.fullmatch(key) for key in properties):
        raise NotBindable
    return properties, required


def _beside_null(schema: Any) -> Any:
    """The other one of two schemas of which one is null, as an optional argument has them; None for any other."""
    branches = schema.get("anyOf") if isinstance(schema, Mapping) else None
    if not isinstance(branches, list) or len(branches) != 2:
        return None
    others = [it for it in branches if types_of(it) != _NULL]
    return others[0] if len(others) == 1 else None


def _strings_of(schema: Any, types: frozenset[str]) -> tuple[list[str] | None, str]:
    """The texts that a schema of strings, and perhaps null, allows, None for any; and a quantifier of their length.

    Null is one of the texts. Raises NotBindable for strings beside other types, and for keywords of `_UNBOUND`.
    """
    if types not in (_STRING, _STRING | _NULL):
        raise NotBindable
    if not isinstance(schema, Mapping):
        return None, "*"
    if any(name in schema for name in _UNBOUND):
        raise NotBindable
    if "anyOf" in schema:
        branch = _beside_null(schema)
        if branch is None or any(name in schema for name in ("enum", "const", *_LENGTH)):
            raise NotBindable
        texts, length = _strings_of(branch, types_of(branch))
        return None if texts is None else [*texts, "null"], length
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if found is None:
        fewest, most = schema.get("minLength", 0), schema.get("maxLength")
        return None, "*" if not fewest and most is None else f"{{{fewest},{'' if most is None else most}}}"
    if any(name in schema for name in _LENGTH) or not all(isinstance(it, str) for it in found) or "null" in found:
        raise NotBindable
    return [*found], ""
