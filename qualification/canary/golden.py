"""The golden file: prompts as token ids, what a trusted server answered greedily, and how fast."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

SCHEMA = 1


class GoldenError(ValueError):
    """The golden file cannot be used."""


class GoldenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    bucket: str  # of its prompt tokens
    token_ids: list[int]
    max_tokens: int
    text: str  # the greedy answer


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    model: str
    recorded_at: str  # ISO 8601, UTC
    fingerprint: dict[str, str | int | None]
    prompts: list[GoldenPrompt]
    ttft_s: dict[str, list[float]]  # by bucket; every sample


class _AnySchema(msgspec.Struct, frozen=True):
    schema: int


def load_golden(path: Path) -> Golden:
    """Raises GoldenError with one line that names the file."""
    try:
        content = path.read_bytes()
        schema = msgspec.json.decode(content, type=_AnySchema).schema
        if schema != SCHEMA:
            raise GoldenError(f"{path} has schema {schema}, this version reads {SCHEMA}")
        return msgspec.json.decode(content, type=Golden)
    except (OSError, msgspec.DecodeError) as error:
        raise GoldenError(f"{path} cannot be used: {error}") from error


def save_golden(path: Path, golden: Golden) -> None:
    """One prompt a line, so that a diff shows which answer changed."""
    prompts = ",\n".join(_json(prompt) for prompt in golden.prompts)
    values = {name: _json(getattr(golden, name)) for name in golden.__struct_fields__} | {"prompts": f"[\n{prompts}\n]"}
    lines = ",\n".join(f'"{name}": {value}' for name, value in values.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def shipped_golden(model: str) -> Path:
    """Where the golden file of a model lies that ships with us."""
    return Path(__file__).parent / f"golden_{re.sub(r'[^a-z0-9]+', '_', model.lower()).strip('_')}.json"


def is_same_machine(golden: Golden, fingerprint: Mapping[str, object]) -> bool:
    return dict(fingerprint) == dict(golden.fingerprint)
