"""The service level objectives: what a good event is, and how many of a hundred must be. A file can change each.

[ttft]
target = 0.99
[ttft.seconds]
le_128 = 0.2
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kernels.vocabulary.buckets import Bucket
from server.errors import SettingsError

Ratio = Annotated[float, Meta(gt=0, lt=1)]
Limit = Annotated[float, Meta(gt=0)]


class LatencyObjective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Objective that a share `target` of all events is within the `seconds` of its prompt's bucket."""

    target: Ratio
    seconds: dict[Bucket, Limit]


class AvailabilityObjective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    target: Ratio


class Objectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft: LatencyObjective
    tpot: LatencyObjective
    availability: AvailabilityObjective


# TTFT: some ten times what an 8B takes on an idle H200 (10 ms at 128 tokens, 1.2 s at 32k), the rest is queue; a person
# notices the first. 50 ms a token are 20 tokens a second, faster than people read.
DEFAULT_OBJECTIVES = Objectives(
    ttft=LatencyObjective(
        0.99,
        {
            Bucket.LE_128: 0.3,
            Bucket.LE_512: 0.5,
            Bucket.LE_2K: 1.0,
            Bucket.LE_8K: 2.5,
            Bucket.LE_32K: 10.0,
            Bucket.LE_128K: 60.0,
            Bucket.GT_128K: 300.0,
        },
    ),
    tpot=LatencyObjective(
        0.99,
        dict.fromkeys(Bucket, 0.05) | {Bucket.LE_128K: 0.1, Bucket.GT_128K: 0.1},
    ),
    availability=AvailabilityObjective(0.999),
)


def load_objectives(path: Path) -> Objectives:
    """The defaults with what a TOML or JSON file changes. Raises SettingsError that names the flag."""
    if path.suffix not in (".toml", ".json"):
        raise SettingsError(f"--slo-file {path}: the name must end in .toml or .json")
    try:
        data = path.read_bytes()
        given = msgspec.toml.decode(data) if path.suffix == ".toml" else msgspec.json.decode(data)
        return msgspec.convert(_over(msgspec.to_builtins(DEFAULT_OBJECTIVES), given), Objectives)
    except OSError as error:
        raise SettingsError(f"--slo-file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SettingsError(f"--slo-file {path}: {error}") from None


def _over(defaults: Any, given: Any) -> Any:
    """`given`, with the keys of `defaults` that it lacks, at every depth."""
    if not isinstance(defaults, Mapping) or not isinstance(given, Mapping):
        return given
    return {**defaults, **{key: _over(defaults.get(key), value) for key, value in given.items()}}
