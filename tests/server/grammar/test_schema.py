"""Answers bound by JSON schemas: numbers, formats, and keywords that are taken or refused by name."""

import json
import random
from typing import Any

import llguidance
import pytest
from fuzz_posts import SCHEMAS, hurt
from schema_suite import Matches, compare_neutral, compare_numbers, documented, matches_of

from server.errors import RequestError, UnsupportedField
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.requested import lark_grammar
from server.grammar.schema import schema_text

LONGEST_LABEL = "a" * 63


def test_random_numbers_are_those_within_random_bounds() -> None:
    found = compare_numbers(seed=3, num_numbers=1500)
    assert found.differences == []
    assert found.counts["numbers"] >= 1500


def test_comparison_finds_what_the_library_does_with_bounds() -> None:
    def by_library(schema: object) -> Matches:
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = llguidance.LLMatcher(byte_tokenizer(), text, log_level=0)

        def matches(text: str) -> bool:
            copy = matcher.deep_copy()
            return bool(copy.consume_tokens([*text.encode()]) and copy.is_accepting())

        return matches

    found = compare_numbers(seed=3, num_numbers=1500, matches_of=by_library)
    assert {name.partition(":")[0] for name in found.differences} == {"taken", "not taken"}


def test_differences_need_a_reason() -> None:
    counts, others = documented(["taken: a", "taken: bc", "not taken: a"], {"taken: a": "x", "taken: b*": "y"})
    assert counts == {"x": 1, "y": 1}
    assert others == ["not taken: a"]


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "number", "maximum": 3.14}, ("3", "3.1", "3.10", "3.14", "-7.5"), ("3.15", "3.141", "4")),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.5", "0.10", '"0"', "null"), ("0", "0.0", "0.6")),
        ({"type": "number", "minimum": -1, "maximum": 0}, ("-1", "-0.50", "0"), ("-1.5", "0.5")),
        ({"type": "number", "exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, ("10.1",), ("10", "10.0", "10.5")),
        ({"type": "number", "minimum": -10.5, "exclusiveMaximum": -10}, ("-10.5", "-10.01"), ("-10", "-10.51")),
        ({"allOf": [{"minimum": 0.25}, {"type": "number", "maximum": 0.75}]}, ("0.25", "0.7"), ("0.2", "0.76", "null")),
        ({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}, ("0.75", "1"), ("0.3", "1.25")),
        ({"anyOf": [{"const": 5}, {"const": 0.5}], "maximum": 3.14}, ("0.5",), ("5",)),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3}, ("1", "2"), ("0", "3", "1.5")),
        ({"type": "integer", "minimum": 0, "maximum": 1e18}, ("1000000000000000000", "0"), ("1000000000000000001",)),
        ({"type": "number", "exclusiveMaximum": 1e17}, ("99999999999999999.5", "-1"), ("100000000000000000",)),
        ({"const": 2**53}, ("9007199254740992",), ("9007199254740991", "9007199254740993")),
        ({"enum": [2**60, "a"]}, ("1152921504606846976", '"a"'), ("1152921504606846975",)),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ("9223372036854775807",), ("9223372036854775808",)),
    ],
)
def test_bounds_are_those_of_the_schema(
    schema: dict[str, Any], taken: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    matches = matches_of(schema)
    assert [text for text in (*taken, *refused) if matches(text)] == [*taken]


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": 9007199254740993}, "the number 9007199254740993 is not"),
        ({"properties": {"id": {"enum": ["a", 1234567890123456789]}}}, "1234567890123456789 at /properties/id"),
        ({"items": {"const": {"a": [-9007199254740993]}}}, "-9007199254740993 at /items"),
        ({"type": "integer", "minimum": -(2**63)}, "-9223372036854775808"),
        ({"type": "integer", "exclusiveMaximum": 9007199254740994}, "9007199254740993"),
        ({"type": "integer", "minimum": 10**18}, "1000000000000000000"),
        ({"maximum": -(10**18)}, "1000000000000000000"),
        ({"minimum": 0.1234567890123456}, "0.1234567890123456"),
        ({"minimum": 1e-30, "maximum": 0.5}, "0.0000000000000000000000000000"),
        ({"const": 9.200000000000001}, "9.200000000000001"),
        ({"enum": [1, {"a": 1e-19}]}, "1e-19"),
        ({"type": "number", "maximum": 1e300}, "1000000"),
        ({"const": 10**400}, "1000000"),
    ],
)
def test_number_that_would_become_another_is_refused(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField, match=named):
        schema_text(schema, "p")


def test_multiples_that_the_library_would_overflow_are_refused() -> None:
    parts: list[dict[str, Any]] = [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]
    for schema in ({"allOf": parts}, {"anyOf": [parts[0]], **parts[1]}):
        with pytest.raises(UnsupportedField, match="multipleOf"):
            schema_text(schema, "p")
    matches = matches_of({"allOf": [{"type": "integer", "multipleOf": 6}, {"multipleOf": 4}]})
    assert [number for number in range(40) if matches(f"{number}")] == [0, 12, 24, 36]
    assert matches_of({"type": "array", "prefixItems": parts})("[65536,65537]")


def test_keywords_that_bind_nothing_are_taken() -> None:
    found = compare_neutral()
    assert found.differences == []
    assert found.counts["texts"] > 300


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"propertyNames": {"type": "string", "maxLength": 3}}, "propertyNames"),
        ({"propertyNames": False}, "propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"nullable": True}, "nullable"),
        ({"not": {}}, "not"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"unevaluatedItems": {"type": "string"}}, "unevaluatedItems"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": False}}, "dependentSchemas"),
        ({"contains": True}, "contains"),
        ({"contains": {"type": "null"}, "minContains": 0, "maxContains": 1}, "contains"),
        ({"if": True, "then": {"type": "null"}}, "if"),
        ({"if": {"type": "null"}, "else": False}, "if"),
        ({"unknown": None}, "unknown"),
    ],
)
def test_keyword_that_would_not_bind_is_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedField, match=f"the keyword '{keyword}' is not"):
        schema_text(schema, "p")


@pytest.mark.parametrize("keyword", ["uniqueItems", "const"])
@pytest.mark.parametrize(
    ("place", "path"),
    [
        *((lambda it, name=name: {name: [{}, it]}, f"/{name}/1") for name in ("allOf", "anyOf", "oneOf")),
        *((lambda it, name=name: {name: [{}, it]}, f"/{name}/1") for name in ("prefixItems", "items")),
        *((lambda it, name=name: {name: it}, f"/{name}") for name in ("items", "additionalProperties")),
        (lambda it: {"items": [{}], "additionalItems": it}, "/additionalItems"),
        *((lambda it, name=name: {name: {"a": it}}, f"/{name}/a") for name in ("properties", "patternProperties")),
        *((lambda it, name=name: {name: {"a": it}}, f"/{name}/a") for name in ("$defs", "definitions")),
    ],
)
def test_schemas_are_looked_at_wherever_they_stand(keyword: str, place: Any, path: str) -> None:
    found = {"uniqueItems": True} if keyword == "uniqueItems" else {"const": 2**53 + 1}
    with pytest.raises(UnsupportedField, match=f" at {path.replace('$', '.')} is not"):
        schema_text(place(found), "p")


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        ("time", ("23:58:59Z", "23:59:60Z", "23:59:60.5+00:00", "08:30:06-08:00"), ("23:58:60Z", "24:00:00Z")),
        ("date-time", ("2024-02-29T12:34:59Z", "1998-12-31T23:59:60Z"),
         ("2024-01-01T12:34:60Z", "2023-02-29T00:00:00Z")),
        ("hostname", (LONGEST_LABEL + ".org", "a." * 126 + "a"), ("a." * 127 + "a", ".".join([LONGEST_LABEL] * 4))),
    ],
)  # fmt: skip
def test_formats_take_no_text_beyond_them(form: str, taken: tuple[str, ...], refused: tuple[str, ...]) -> None:
    for schema in ({"type": "string", "format": form}, {"format": form, "pattern": ".", "maxLength": 300}):
        matches = matches_of(schema)
        assert [text for text in (*taken, *refused) if matches(json.dumps(text))] == [*taken]


VALID = (
    *SCHEMAS,
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 3, "multipleOf": 0.1, "anyOf": [{"type": "integer"}]},
    {
        "type": ["integer", "null"],
        "exclusiveMinimum": 0,
        "enum": [1, 2],
        "allOf": [{"minimum": 1}],
        "not": {"const": 3},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "time"}},
        "required": ["a"],
        "patternProperties": {"^x": {}},
        "additionalProperties": {"type": "number", "maximum": 3.14},
        "propertyNames": {"type": "string"},
        "dependentRequired": {},
        "if": {},
    },
    {"type": "array", "prefixItems": [{"type": "integer", "minimum": 2}], "contains": True, "minContains": 0},
)


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        ('^[^"]*$', ("a", "\n", "\\"), ('"', 'a"b')),
        (r"^[^\\]*$", ("a", '"'), ("\\",)),
        (r'^([^"\n]|\t)$', ("a", "\t", "\\"), ('"', "\n")),
        ("^[^[:punct:]]+$", ("a b",), ('"', "\\")),
        (r"^\P{P}$", ("a", "\t"), ('"', "\\")),
        ("^[\0-\x1fa]$", ("a", "\0", "\n"), ('"', "\\")),
        ('^[^]"[ab]]$', ("c", "\\"), ('"', "]", "a")),
        (r'^\[[^"]\]$', ("[a]",), ('["]', "]")),
    ],
)
def test_a_class_without_quotes_takes_none(pattern: str, taken: tuple[str, ...], refused: tuple[str, ...]) -> None:
    matches = matches_of({"type": "string", "pattern": pattern})
    assert [text for text in (*taken, *refused) if matches(json.dumps(text))] == [*taken]
    named = matches_of({"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False})
    assert [text for text in (*taken, *refused) if named(json.dumps({text: 1}))] == [*taken]


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "number", "maximum": 3.14}, ("3", "3.15", "1e0")),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ('{"a": 1}', '{"a":1}', '{"a": 1, "b": 2}')),
        ({"type": "string", "pattern": '^[^"]*$'}, ('"a"', '"a\\"b"')),
        ({"type": "string", "format": "date"}, ('"2026-02-28"', '"2026-02-29"')),
        ({"type": "array", "items": {"type": "integer"}}, ("[1, 2]", "[1,   2]")),
        ({"const": '%json {"a": /'}, ('"%json {\\"a\\": /"',)),
    ],
)
def test_a_schema_within_a_grammar_binds_like_one_alone(schema: dict[str, Any], texts: tuple[str, ...]) -> None:
    alone = matches_of(schema)
    written = json.dumps(schema, indent=1)
    grammar = lark_grammar(f'start: "<%json {{" part /\\// part // %json [\npart: %json {written}', "p")
    matcher = compiled(byte_tokenizer(), grammar)

    def within(text: str) -> bool:
        found, ids = matcher.deep_copy(), [*f"<%json {{{text}/{text}".encode()]
        return bool(found.try_consume_tokens(ids) == len(ids) and found.is_accepting())

    assert [within(text) for text in texts] == [alone(text) for text in texts]
    own = lark_grammar(f"start: %json {json.dumps(schema | {'x-guidance': {'whitespace_flexible': False}})}", "p")
    assert own.text.count("x-guidance") == 1
    assert '"whitespace_flexible": false' in own.text


@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_schema_is_read_or_refused(seed: int) -> None:
    rng, num_refused = random.Random(seed), 0
    for _ in range(2000):
        schema = json.loads(json.dumps(rng.choice(VALID)))
        for _ in range(rng.randint(1, 3)):
            schema = hurt(rng, schema)
        try:
            schema_text(schema, "schema")
        except RequestError:
            num_refused += 1
    assert 200 < num_refused < 1800
