"""Compare answers bound by JSON schemas with JSON Schema's own suite, and numbers with their bounds.

python trials/schema_suite.py SUITE --numbers 1000000 --out docs/benchmarks/schema-suite.json

SUITE  the source archive of PyPI's package `jsonschema`, which holds the suite (draft 2020-12, the optional parts too)

A schema is refused by name, or binds: then no text of the suite that is invalid is taken. One that is, or a valid one
that is not, is a difference, and must be in schema_differences.toml with its reason. Keywords whose value takes
everything are taken. Random numbers are compared with random bounds by decimal arithmetic: none that is outside is
taken, and each that is inside can be written. The exit status is 1 for anything else.
"""

import argparse
import json
import os
import platform
import random
import re
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import llguidance

from server.errors import InvalidGrammar, UnsupportedField
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.requested import json_grammar

DIFFERENCES = Path(__file__).with_name("schema_differences.toml")
DRAFT = "/json/tests/draft2020-12/"
# Keywords that bind nothing with these values, beside others that make them so.
NEUTRAL: tuple[dict[str, Any], ...] = (
    *({"propertyNames": it} for it in (True, {}, {"type": "string"}, {"type": ["string", "null"], "title": "key"})),
    *({"uniqueItems": False}, {"nullable": False}, {"not": False}, {"if": {"type": "string"}}),
    *({"then": False}, {"else": False}, {"if": False, "then": True, "else": {}}),
    *({"unevaluatedProperties": it} for it in (True, {})),
    *({"unevaluatedItems": it} for it in (True, {})),
    *({"dependentRequired": {}}, {"dependentRequired": {"a": []}}, {"dependencies": {"a": [], "b": True}}),
    *({"dependentSchemas": {}}, {"dependentSchemas": {"a": {}, "b": True}}),
    *({"contains": True, "minContains": 0}, {"contains": {"type": "null"}, "minContains": 0}),
    *({"minContains": 3}, {"maxContains": 0}),
    *({"contentMediaType": "application/json"}, {"contentEncoding": "base64"}, {"contentSchema": False}),
    *({"$dynamicAnchor": "a"}, {"$vocabulary": {}}, {"$comment": "a"}, {"deprecated": True}, {"x-order": 1}),
)
SAMPLES = ("null", "true", "-1.5", '"a"', '[1,1,"a"]', '{"b":[{}]}')  # of what everything is taken

Matches = Callable[[str], bool]


@dataclass(slots=True)
class Found:
    """Counts of what was compared, and the names of what differs."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def matches_of(schema: object) -> Matches:
    """Return whether a text is a whole answer under a schema. Raises UnsupportedField and InvalidGrammar."""
    matcher = compiled(byte_tokenizer(), json_grammar(schema, "schema"))

    def matches(text: str) -> bool:
        copy = matcher.deep_copy()
        return bool(copy.consume_tokens([*text.encode()]) and copy.is_accepting())

    return matches


def suite_of(archive: Path) -> dict[str, Any]:
    """The groups of the suite's tests by file."""
    with tarfile.open(archive) as files:
        return {
            name.partition(DRAFT)[2]: json.load(content)
            for name in sorted(files.getnames())
            if DRAFT in f"/{name}" and name.endswith(".json") and (content := files.extractfile(name))
        }


def compare_suite(suite: Mapping[str, Any]) -> Found:
    """Take each schema of the suite, and of those that bind each text."""
    found = Found()
    for file, groups in suite.items():
        for group in groups:
            found.counts["schemas"] += 1
            try:
                matches = matches_of(group["schema"])
            except (UnsupportedField, InvalidGrammar) as error:
                found.refused[_reason(error.message)] += 1
                continue
            found.counts["bound"] += 1
            for case in group["tests"]:
                found.counts["texts"] += 1
                if matches(json.dumps(case["data"], ensure_ascii=False)) is not case["valid"]:
                    word = "not taken" if case["valid"] else "taken"
                    found.differences.append(f"{word}: {file}: {group['description']}: {case['description']}")
    return found


def _reason(message: str) -> str:
    """Return why a schema was refused, without the place and the values."""
    named = re.search(r"the (keyword|format) '[^']*'", message)
    if named:
        return named[0]
    for reason in (
        "oneOf",
        "schema is false",
        "Resource",
        "Expected positive integer",
        "not disjoint",
        "the number",
        "Unsatisfiable",
    ):
        if reason in message:
            return reason
    return message.partition(": ")[2][:60]


def compare_neutral() -> Found:
    """Take each keyword that binds nothing, alone and within an object."""
    found = Found()
    for keywords in NEUTRAL:
        for schema, form in ((keywords, "{}"), ({"properties": {"c": keywords}, "required": ["c"]}, '{{"c":{}}}')):
            try:
                matches = matches_of(schema)
            except (UnsupportedField, InvalidGrammar) as error:
                found.differences.append(f"refused: {json.dumps(schema)}: {error.message}")
                continue
            for text in SAMPLES:
                found.counts["texts"] += 1
                if not matches(form.format(text)):
                    found.differences.append(f"not taken: {json.dumps(schema)}: {text}")
    return found


def random_number(rng: random.Random, num_digits: int = 8) -> Decimal:
    """A number of few or many digits, before and behind the point."""
    digits = rng.randint(1, num_digits)
    num_decimals = rng.choice((0, 0, 1, 2, 2, 3, digits)) + (rng.randint(5, 20) if rng.random() < 0.02 else 0)
    number = Decimal(rng.randint(0, 10**digits - 1)).scaleb(-num_decimals)
    return number if rng.random() < 0.7 else -number


def random_bounds(rng: random.Random) -> dict[str, Any]:
    """A schema of numbers with one bound or several, of which some are near one another and some beyond a double."""
    schema: dict[str, Any] = {"type": rng.choice(("number", "number", "number", "integer", ["number", "null"]))}
    num_digits = rng.choice((3, 6, 6, 9, 15, 20)) if schema["type"] == "integer" else rng.choice((1, 2, 4, 6, 9))
    low = random_number(rng, num_digits)
    step = abs(random_number(rng, rng.choice((1, 2, num_digits)))) or Decimal(1)
    high = low + step.scaleb(-rng.choice((0, 0, 1, 2, 3)))
    if rng.random() < 0.1:  # far from 0, and mostly numbers that a double holds
        low, high = (bound.scaleb(rng.randint(6, 12)) for bound in (low, high))
    which = rng.choice(("low", "high", "both", "both", "all"))
    if which != "high":
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = _json(low)
    if which != "low":
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = _json(high)
    if which == "all":
        schema["exclusiveMinimum"], schema["maximum"] = _json(low), _json(high)
    return schema


def _json(number: Decimal) -> float:
    return int(number) if number == number.to_integral_value() else float(number)


def candidates(rng: random.Random, schema: Mapping[str, Any]) -> Iterator[str]:
    """Texts of numbers at each bound, near it, and anywhere; some with zeros behind, some with an exponent."""
    bounds = [_exact(value) for name, value in schema.items() if name != "type"]
    for bound in bounds:
        for num_decimals in range(5):
            cut = bound.quantize(Decimal(1).scaleb(-num_decimals), "ROUND_FLOOR")
            for number in (cut, cut + Decimal(1).scaleb(-num_decimals), cut - Decimal(1).scaleb(-num_decimals)):
                yield f"{number:f}"
        for _ in range(10):
            yield f"{bound + random_number(rng, 6).scaleb(-rng.randint(0, 6)):f}"
        mixed = bounds[0] + (bounds[-1] - bounds[0]) * Decimal(rng.randint(0, 1000)).scaleb(-3)
        yield f"{mixed:f}"
        yield f"{bound:e}"
        yield f"{random_number(rng, 20):f}"
    yield from ("0", "1", "-1", "0.5", "0.10", "1e0", "-0")


def _exact(value: float) -> Decimal:
    return Decimal(repr(value))


def is_within(text: str, schema: Mapping[str, Any]) -> bool:
    number = Decimal(text)
    return not (
        (schema["type"] == "integer" and number != number.to_integral_value())
        or ("minimum" in schema and number < _exact(schema["minimum"]))
        or ("exclusiveMinimum" in schema and number <= _exact(schema["exclusiveMinimum"]))
        or ("maximum" in schema and number > _exact(schema["maximum"]))
        or ("exclusiveMaximum" in schema and number >= _exact(schema["exclusiveMaximum"]))
    )


def must_be_writable(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a text must be taken where its number is within: one way to write each number is enough.

    Behind bounds no exponent can be written, no -0, no more than 15 digits, and no zeros behind a bound itself.
    """
    if "e" in text.lower() or (text.startswith("-0") and not Decimal(text)) or sum(map(str.isdigit, text)) > 15:
        return schema["type"] == "integer" and text.lstrip("-").isdigit() and text != "-0"
    if "." not in text or not text.endswith("0"):
        return True
    return schema["type"] != "integer" and Decimal(text) not in [
        _exact(value) for name, value in schema.items() if name != "type"
    ]


def is_writable(text: str, matches: Matches) -> bool:
    """Return whether a text is taken; one that ends with zeros perhaps with more of them."""
    tails = range(20 if "." in text and text.endswith("0") else 1)
    return any(matches(text + "0" * num_zeros) for num_zeros in tails)


def compare_numbers(seed: int, num_numbers: int, matches_of: Callable[[object], Matches] = matches_of) -> Found:
    """Compare so many random numbers with random bounds."""
    with localcontext(prec=100):
        return _compare_numbers(random.Random(seed), num_numbers, matches_of)


def _compare_numbers(rng: random.Random, num_numbers: int, matches_of: Callable[[object], Matches]) -> Found:
    found = Found()
    while found.counts["numbers"] < num_numbers:
        schema = random_bounds(rng)
        texts = {*candidates(rng, schema)}
        within = {text for text in texts if is_within(text, schema)}
        try:
            matches = matches_of(schema)
        except (UnsupportedField, InvalidGrammar) as error:
            found.counts["refused"] += 1
            found.refused[_reason(error.message)] += 1
            is_named = isinstance(error, UnsupportedField) and "the number" in error.message
            if not is_named and any(must_be_writable(text, schema) for text in within):
                found.differences.append(f"refused: {json.dumps(schema)}: {error.message}")
            continue
        found.counts["bounds"] += 1
        for text in sorted(texts):
            found.counts["numbers"] += 1
            is_taken = matches(text)
            if is_taken and text not in within:
                found.differences.append(f"taken: {json.dumps(schema)}: {text}")
            elif text in within and must_be_writable(text, schema) and not (is_taken or is_writable(text, matches)):
                found.differences.append(f"not taken: {json.dumps(schema)}: {text}")
    return found


def documented(names: list[str], reasons: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Count differences by their reason; return those that have none, too. A name that ends with * begins others."""
    counts: Counter[str] = Counter()
    others = []
    for name in names:
        known = (it for it in reasons if it == name or (it.endswith("*") and name.startswith(it[:-1])))
        if (which := next(known, None)) is None:
            others.append(name)
        else:
            counts[reasons[which]] += 1
    return dict(counts.most_common()), others


def reasons_of(path: Path) -> dict[str, str]:
    """Reasons of differences by their names."""
    content = tomllib.loads(path.read_text("utf-8"))
    return {case: it["reason"] for it in content["difference"] for case in it["cases"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("suite", type=Path, help="jsonschema-VERSION.tar.gz")
    parser.add_argument("--numbers", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    suite, neutral, numbers = compare_suite(suite_of(args.suite)), compare_neutral(), None
    numbers = compare_numbers(args.seed, args.numbers)
    by_reason, others = documented(suite.differences, reasons_of(DIFFERENCES))
    others += neutral.differences + numbers.differences
    result = {
        "command": " ".join(["python", "trials/schema_suite.py", args.suite.name, *sys.argv[2:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "llguidance": llguidance.__version__,
        "suite": args.suite.name.removesuffix(".tar.gz"),
        "draft": "2020-12",
        "counts": {**suite.counts, "refused": suite.refused.total(), "differences": len(suite.differences)},
        "refused_by_reason": dict(suite.refused.most_common()),
        "differences_by_reason": by_reason,
        "neutral_keywords": {"schemas": 2 * len(NEUTRAL), **neutral.counts, "differences": len(neutral.differences)},
        "numbers": {"seed": args.seed, **numbers.counts, "differences": len(numbers.differences)},
        "numbers_refused_by_reason": dict(numbers.refused.most_common()),
        "others": len(others),
        "first_others": others[:20],
    }
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if args.out is not None:
        args.out.write_text(text)
    print(text, end="")
    for name in others:
        print(f"FAILED {name}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
