"""JSON that cannot surprise: bounded depth, finite numbers, no duplicate keys, UTF-8."""

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

import msgspec

from server.edge.redact import shown
from server.errors import InvalidJson

MAX_DEPTH = 32
# Arrays, objects and fields: 8 MB of them hold up every other request for 1 to 2 s while they are parsed (a busy core).
MAX_PARTS = 50_000
# A mark, of which each has one, or a string or what is left of one, which may be full of marks: linear in any case.
_TOKEN = re.compile(rb'[\[{:]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises InvalidJson for anything else."""
    num_containers = _check_parts(body)
    value = _quickly(body, num_containers)
    if value is None:
        value = _carefully(body)
        if num_containers > MAX_DEPTH:
            _check_depth(value)
    if not isinstance(value, dict):
        raise InvalidJson(f"The body must be an object, got {shown(value)}.")
    return value


def _quickly(body: bytes, num_containers: int) -> dict[str, Any] | None:
    """What `_carefully` would say, in a third of the time where the body holds token ids; None where that may differ.

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
    return value if isinstance(value, dict) and _num_fields(value) == body.count(b":") else None


def _num_fields(value: dict[str, Any]) -> int:
    """But for those of objects in arrays."""
    return len(value) + sum([_num_fields(inner) for inner in value.values() if isinstance(inner, dict)])


def _carefully(body: bytes) -> Any:
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


def _check_parts(body: bytes) -> int:
    """At least as many arrays and objects as there are. Raises InvalidJson for too many."""
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers + body.count(b":") <= MAX_PARTS:
        return num_containers
    num_parts = 0
    for token in _TOKEN.finditer(body):
        num_parts += body[token.start()] != ord('"')
        if num_parts > MAX_PARTS:
            raise InvalidJson(f"The body may have {MAX_PARTS} arrays, objects and fields, it has more.")
    return num_containers


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (v for container in level for v in (container.values() if isinstance(container, dict) else container))
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return
    raise InvalidJson(f"The body is nested deeper than {MAX_DEPTH} levels.")
