"""Bounds of numbers in JSON schemas, in a form of which llguidance 1.9.1 makes the right regular expression.

Its own expressions are wrong in six ways (reports: mlc-ai/xgrammar pull requests 661 and 667 show the same kind):

- `maximum: 3.14` forbids 3.1: every bound's prefix with fewer decimals is missing;
- `exclusiveMinimum: 0` beside `maximum: 0.5` takes 0: an excluded whole number and a bound less than 1 from it;
- `exclusiveMinimum: 1` forbids 1.50: behind an excluded bound a number may not end with a zero, and what has begun with
  one must go on to another value;
- `minimum: -1` beside `maximum: 0` forbids -0.50: below 0 and beside it, too, a number may not end with a zero;
- two `multipleOf` of one number, which `allOf` brings together, overflow 32 bits: 65536 passes for one of 65537;
- numbers are doubles: 9007199254740993 becomes ...992, and bounds beyond 64 bits fail.

A range is cut here into pieces for which none of this happens, by decimal arithmetic; integers that a double does not
hold are refused by name.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Any, TypeGuard

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OTHERS = ("null", "boolean", "string", "array", "object")  # types that bounds of numbers do not bind
_MAX_INT64 = 2**63 - 1  # as a maximum the library takes it right: the double above it is cut to 64 bits
_FAR = 10**18  # from here on the library needs the other bound, too
_NUM_DIGITS = 15  # decimals of so many the library reads and writes unchanged; of 16 and 17 it reads some as others
_MOST_DECIMALS = 18  # that the library compares
_EXACT = Context(prec=64)


class InexactNumber(Exception):
    """A number that the library would read as another one. `text`: the number."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two bounds, None for no bound; either may be excluded."""

    low: Decimal | None = None
    high: Decimal | None = None
    excludes_low: bool = False
    excludes_high: bool = False

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.excludes_low or self.excludes_high))

    def negated(self) -> "Range":
        low = None if self.high is None else self.high.copy_negate()
        high = None if self.low is None else self.low.copy_negate()
        return Range(low, high, self.excludes_high, self.excludes_low)

    def keywords(self) -> Mapping[str, float]:
        """Return the range in the words of JSON schema."""
        found = {}
        if self.low is not None:
            found["exclusiveMinimum" if self.excludes_low else "minimum"] = _number(self.low)
        if self.high is not None:
            found["exclusiveMaximum" if self.excludes_high else "maximum"] = _number(self.high)
        return found


def bind_numbers(schema: dict[str, Any]) -> None:
    """Replace the bounds of numbers in a schema, which may be beside anything else, by those of pieces, in place.

    Raises InexactNumber. What is no number is left to the library, which refuses it.
    """
    check_exact([schema.get("const"), schema.get("enum")])
    given = {name: schema[name] for name in BOUNDS if name in schema}
    if not given or not all(_is_number(value) for value in given.values()):
        return
    kind = schema.get("type")
    names = kind if isinstance(kind, list) else [*_OTHERS, "number"] if kind is None else [kind]
    if not all(isinstance(name, str) for name in names) or not isinstance(schema.get("allOf", []), list):
        return  # the library refuses it
    kinds = set(names)
    if not kinds & {"number", "integer"}:
        return
    wanted = _range_of(given)
    ranges = [it.keywords() for it in _pieces(wanted)] if "number" in kinds else [_whole(wanted)]
    if wanted.is_empty:
        return  # the library says so
    for name in given:
        del schema[name]
    if len(ranges) == 1:
        schema.update(ranges[0])
        return
    pieces: list[dict[str, Any]] = [{"type": "number", **it} for it in ranges]
    if others := sorted(kinds - {"number", "integer"}):
        pieces.append({"type": others})
    if "anyOf" not in schema:
        schema["anyOf"] = pieces
    else:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": pieces}]


def check_exact(value: object) -> None:
    """Raise InexactNumber for a number anywhere in a value of JSON that the library would change."""
    if isinstance(value, list):
        for item in value:
            check_exact(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            check_exact(item)
    elif isinstance(value, int) and not _is_double(value):
        raise InexactNumber(str(value))
    elif isinstance(value, float) and not _is_short(_decimal(value)):
        raise InexactNumber(repr(value))


def has_long_multiple(steps: Iterable[object]) -> bool:
    """Return whether several `multipleOf` might have a common multiple of more than 32 bits, which overflows."""
    found = {_decimal(step) for step in steps if _is_number(step)}
    num_decimals = max(map(_num_decimals, found), default=0)
    return len(found) > 1 and math.prod(int(step.scaleb(num_decimals, _EXACT)) for step in found) >= 2**32


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _number(value: Decimal) -> float:
    return int(value) if value == value.to_integral_value() else float(value)


def _range_of(given: Mapping[str, float]) -> Range:
    """The range that four keywords leave; of two lower bounds the higher one holds, and the excluded one of equals."""
    found = Range()
    for name, is_excluded in (("minimum", False), ("exclusiveMinimum", True)):
        value = _decimal(given[name]) if name in given else None
        if value is not None and (found.low is None or value > found.low or (is_excluded and value == found.low)):
            found = replace(found, low=value, excludes_low=is_excluded)
    for name, is_excluded in (("maximum", False), ("exclusiveMaximum", True)):
        value = _decimal(given[name]) if name in given else None
        if value is not None and (found.high is None or value < found.high or (is_excluded and value == found.high)):
            found = replace(found, high=value, excludes_high=is_excluded)
    return found


def _decimal(value: float) -> Decimal:
    """The number as JSON writes it: the shortest decimal of a double."""
    return Decimal(repr(value))


def _whole(wanted: Range) -> Mapping[str, float]:
    """The bounds of the integers in a range, both included. Raises InexactNumber."""
    found = {}
    if (low := wanted.low) is not None:
        first = int(low.to_integral_value("ROUND_CEILING"))
        found["minimum"] = first + (wanted.excludes_low and first == low)
    if (high := wanted.high) is not None:
        last = int(high.to_integral_value("ROUND_FLOOR"))
        found["maximum"] = last - (wanted.excludes_high and last == high)
    for name, value in found.items():
        if not (_is_exact(value) or (name == "maximum" and value == _MAX_INT64)):
            raise InexactNumber(str(value))
    _check_not_far(found.get("minimum"), found.get("maximum"))
    return found


def _is_exact(value: int) -> bool:
    return abs(value) <= _MAX_INT64 and _is_double(value)


def _check_not_far(low: Decimal | int | None, high: Decimal | int | None) -> None:
    """Raise InexactNumber for a range that begins far from 0 and has no end."""
    for begin, end in ((low, high), (None if high is None else -high, low)):
        if begin is not None and begin >= _FAR and end is None:
            raise InexactNumber(f"{begin:f}" if isinstance(begin, Decimal) else str(begin))


def _pieces(wanted: Range) -> Iterator[Range]:
    """Cut a range: below 0, and from 0 on; not one of one sign between whole numbers, both included.

    Raises InexactNumber.
    """
    for bound in (wanted.low, wanted.high):
        if bound is None:
            continue
        is_whole = bound == bound.to_integral_value()
        if not (_is_exact(int(bound)) if is_whole else _is_short(bound)):
            raise InexactNumber(f"{bound:f}")
    _check_not_far(wanted.low, wanted.high)
    zero = Decimal(0)
    has_one_sign = (wanted.low is not None and wanted.low >= zero) or (wanted.high is not None and wanted.high < zero)
    is_whole = all(bound is None or bound == bound.to_integral_value() for bound in (wanted.low, wanted.high))
    if has_one_sign and is_whole and not (wanted.excludes_low or wanted.excludes_high):
        yield wanted
        return
    if wanted.low is None or wanted.low < 0:
        high = wanted.high
        below = wanted if high is not None and high < 0 else replace(wanted, high=zero, excludes_high=True)
        yield from (piece.negated() for piece in _positive_pieces(below.negated()))
    if wanted.high is None or wanted.high >= 0:
        is_above = wanted.low is not None and wanted.low >= 0
        yield from _positive_pieces(wanted if is_above else replace(wanted, low=zero, excludes_low=False))


def _positive_pieces(wanted: Range) -> Iterator[Range]:
    """Cut a range whose lower bound is 0 or above.

    [1.5, 3.14] becomes [1.5, 3], [3, 3.1] and [3.1, 3.14]: of each piece the upper bound has at most one decimal more
    than what both bounds begin with.
    """
    assert wanted.low is not None
    low, high, excludes_low = wanted.low, wanted.high, wanted.excludes_low
    if excludes_low and (above := _next(low)) is not None and not (high is not None and above > high):
        if high is None or int(low) < int(high):
            end = Decimal(int(low) + 1)  # of a piece with numbers that are nearer to the bound
            yield Range(low, end, excludes_low=True, excludes_high=wanted.excludes_high and end == high)
        low, excludes_low = above, False
    if high is None:
        yield Range(low, None, excludes_low)
        return
    high = _stripped(high)
    begin = low
    for num_decimals in range(_num_decimals(high) + 1):
        end = high.quantize(Decimal(1).scaleb(-num_decimals), "ROUND_FLOOR", _EXACT)
        piece = Range(begin, end, excludes_low and begin == low, wanted.excludes_high and end == high)
        if piece.is_empty or (begin == end != low):
            continue
        yield piece
        begin = end


def _next(number: Decimal) -> Decimal | None:
    """The nearest number above one that the library can tell from it, with 18 decimals at most; None for none."""
    for num_decimals in range(_MOST_DECIMALS, _num_decimals(number), -1):
        above = _EXACT.add(number, Decimal(1).scaleb(-num_decimals))
        if _num_digits(above) <= _NUM_DIGITS:
            return above
    return None


def _stripped(value: Decimal) -> Decimal:
    return _EXACT.plus(value).normalize(_EXACT)


def _num_digits(value: Decimal) -> int:
    return len(_stripped(value).as_tuple().digits)


def _is_short(value: Decimal) -> bool:
    """Return whether the library reads a decimal unchanged, and compares all of it."""
    return _num_digits(value) <= _NUM_DIGITS and _num_decimals(value) <= _MOST_DECIMALS


def _num_decimals(value: Decimal) -> int:
    exponent = _stripped(value).as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)
