"""JSON that cannot surprise: bounded depth, finite numbers, no duplicate keys, UTF-8."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from server.edge.redact import redacted
from server.errors import InvalidJson

MAX_DEPTH = 32
# Arrays, objects and fields: 8 MB of them hold up every other request for 1 to 2 s while they are parsed (a busy core).
MAX_PARTS = 50_000
# Items of arrays and fields of objects: an item of 2 bytes takes 50 when it is parsed. So a body of 8 MiB and what is
# made of it take less than 16 MiB together, but for long strings.
MAX_VALUES = 2**17
_MARK = re.compile(rb'[\[{:,"]')
# A piece of a string, which may be full of marks. One match holds the interpreter's lock: 8 MiB took 80 ms.
_STRING_PIECE = re.compile(rb'[^"\\]{0,65536}+(?:\\.[^"\\]{0,64}+){0,1024}+', re.DOTALL)
_COLON, _COMMA, _QUOTE = b':,"'
LARGE_BYTES = 64 * 1024  # a second parser would need more memory and time than a look at each mark


def parse_json(body: bytes | bytearray, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The object in `body`. Raises InvalidJson for anything else."""
    num_containers = _check_parts(body, max_values)
    value = _quickly(body, num_containers)
    if value is None:
        value = _carefully(body)
        if num_containers > MAX_DEPTH:
            _check_depth(value)
    if not isinstance(value, dict):
        raise InvalidJson(f"The body must be an object, got {redacted(value)}.")
    return value


def _quickly(body: bytes | bytearray, num_containers: int) -> dict[str, Any] | None:
    """Parse as `_carefully` does, in a third of its time for token ids; return None where the result may differ.

    Raises InvalidJson for one nested too deeply: before its fields are counted, which takes a call a level.

    The parser takes the last of two equal keys. Every field has a colon: where there are as many fields as colons, none
    was lost.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if num_containers > MAX_DEPTH:
        _check_depth(value)
    if not isinstance(value, dict):
        return None
    num_fields = _num_fields(value)
    if num_fields == body.count(b":") or (len(body) > LARGE_BYTES and num_fields == _num_colons(body)):
        return value
    return None


def _num_fields(value: dict[str, Any]) -> int:
    """Count the fields of an object, but for those of objects in arrays that begin with something else."""
    num_fields = len(value)
    for inner in value.values():
        if isinstance(inner, dict):
            num_fields += _num_fields(inner)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            num_fields += sum([_num_fields(item) for item in inner if isinstance(item, dict)])
    return num_fields


def _carefully(body: bytes | bytearray) -> Any:
    """Raises InvalidJson, which says what is wrong."""
    try:
        return _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8 at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"The body is not JSON: {error.msg} at line {error.lineno} column {error.colno}.") from None
    except RecursionError:
        raise InvalidJson(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError:  # an integer beyond the interpreter's limit of 4300 digits
        raise InvalidJson("The body has an integer of more than 4300 digits.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise InvalidJson(f"The body has the key {counts.most_common(1)[0][0][:64]!r} twice in one object.")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise InvalidJson(f"The body has {text}, which is not JSON; numbers must be finite.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidJson(f"The body has the number {text[:32]}, which is too large; numbers must be finite.")
    return number


# Made once: json.loads makes one for each text. Nothing of it changes while it decodes.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)


def _check_parts(body: bytes | bytearray, max_values: int) -> int:
    """Return an upper bound of the number of arrays and objects. Raises InvalidJson for too many, or for values."""
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers + body.count(b":") <= MAX_PARTS and body.count(b",") < max_values:
        return num_containers
    num_parts, num_values = 0, 1
    for mark in _marks(body):
        if mark == _COMMA:
            num_values += 1
            if num_values > max_values:
                raise InvalidJson(f"The body may have {max_values} items and fields, it has more; send fewer prompts.")
        else:
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise InvalidJson(f"The body may have {MAX_PARTS} arrays, objects and fields, it has more.")
    return num_containers


def _num_colons(body: bytes | bytearray) -> int:
    """Count the colons outside strings."""
    return sum(mark == _COLON for mark in _marks(body))


def _marks(body: bytes | bytearray) -> Iterator[int]:
    """Yield each mark of arrays, objects and fields outside strings."""
    found = _MARK.search(body)
    while found is not None:
        end = found.end()
        mark = body[end - 1]
        if mark == _QUOTE:
            end = _end_of_string(body, end)
        else:
            yield mark
        found = _MARK.search(body, end)


def _end_of_string(body: bytes | bytearray, begin: int) -> int:
    """Return the place behind the closing quote of the string whose text begins at `begin`, or the body's length."""
    while (piece := _STRING_PIECE.match(body, begin)) and piece.end() > begin:
        begin = piece.end()
    return min(begin + 1, len(body))


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (v for container in level for v in (container.values() if isinstance(container, dict) else container))
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return
    raise InvalidJson(f"The body is nested deeper than {MAX_DEPTH} levels.")
