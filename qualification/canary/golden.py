"""The golden file: prompts as token ids, what a trusted server made of them, and how fast."""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from qualification.common.regular_file import read_regular
from qualification.receipt.signed import ReceiptError, check_consistent, receipt_of

SCHEMA = 2


class GoldenError(ValueError):
    """The golden file cannot be used."""


class GoldenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    bucket: str  # of its prompt tokens
    token_ids: list[int]
    max_tokens: int
    text: str  # the greedy answer
    places: list[int]  # positions of the tokens whose log probability is kept, from 1 on
    logprobs: list[float]  # natural, of those tokens given all before them
    likeliest: list[int]  # token at each place


class MixAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer; a chat's has no tokens."""

    text: str
    token_ids: list[int] = []
    logprobs: list[float] = []  # natural, of those tokens, before any penalty


class GoldenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of a mix, and what was answered when it was asked alone."""

    name: str
    path: str  # of the API
    body: dict[str, Any]  # without model and salt
    salt: str = ""  # what is added to the salt of a run
    num_prompt_tokens: int = 0
    answers: list[MixAnswer] = []

    @property
    def is_greedy(self) -> bool:
        """Return whether each token is the likeliest of those that may come."""
        is_penalised = any(name.endswith("_penalty") for name in self.body)
        return self.body.get("temperature") == 0 and not is_penalised


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every sample of one bucket, seconds."""

    ttft_s: list[float]
    tpot_s: list[float]


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    model: str
    recorded_at: str  # ISO 8601, UTC
    expires_at: str | None  # likewise; None: never
    fingerprint: dict[str, str | int | None]
    prompts: list[GoldenPrompt]
    times: dict[str, Times]  # by bucket
    model_digests: dict[str, str] = {}  # of tokenizer and weights; files of before have none
    receipts: list[dict[str, Any]] = []  # of a server that promises equal bits; otherwise and before there are none
    mix: list[GoldenRequest] = []  # likewise
    max_model_len: int | None = None  # likewise


class _AnySchema(msgspec.Struct, frozen=True):
    schema: int


def load_golden(path: Path) -> Golden:
    """Read a golden file. Raises GoldenError with one line that names the file."""
    try:
        content = read_regular(path)
        schema = msgspec.json.decode(content, type=_AnySchema).schema
        if schema != SCHEMA:
            raise GoldenError(f"{path} has schema {schema}, this version reads {SCHEMA}: record it anew")
        golden = msgspec.json.decode(content, type=Golden)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise GoldenError(f"{path} cannot be used: {error}") from error
    for prompt in golden.prompts:
        if not len(prompt.places) == len(prompt.logprobs) == len(prompt.likeliest):
            raise GoldenError(f"{path} cannot be used: {prompt.name} has not one log probability for each place")
        if any(not 1 <= place < len(prompt.token_ids) for place in prompt.places):
            raise GoldenError(f"{path} cannot be used: {prompt.name} has a place outside of its prompt")
    for place, receipt in enumerate(golden.receipts):
        try:
            check_consistent(receipt_of(receipt).content)
        except ReceiptError as error:
            raise GoldenError(f"{path} cannot be used: receipts[{place}]: {error}") from error
    for request in golden.mix:
        if any(len(answer.logprobs) != len(answer.token_ids) for answer in request.answers):
            raise GoldenError(f"{path} cannot be used: {request.name} has not one log probability for each token")
    for bucket, times in golden.times.items():
        if min([*times.ttft_s, *times.tpot_s], default=1.0) <= 0:
            raise GoldenError(f"{path} cannot be used: a time of {bucket} is not positive")
    return golden


def check_date(golden: Golden, now: datetime) -> None:
    """Refuse a golden file past its date. Raises GoldenError."""
    try:
        is_over = golden.expires_at is not None and datetime.fromisoformat(golden.expires_at) <= now
    except (ValueError, TypeError) as error:
        raise GoldenError(f"the golden file's date {golden.expires_at!r} cannot be read: {error}") from error
    if is_over:
        raise GoldenError(f"the golden file of {golden.recorded_at} expired at {golden.expires_at}: record it anew")


def save_golden(path: Path, golden: Golden) -> None:
    """One prompt, request or receipt a line, so that a diff shows which answer changed."""
    values = {name: _json(getattr(golden, name)) for name in golden.__struct_fields__}
    for name in ("prompts", "mix", "receipts"):
        lines_of = ",\n".join(_json(it) for it in getattr(golden, name))
        values[name] = f"[\n{lines_of}\n]"
        if name != "prompts" and not getattr(golden, name):  # as files of before, which older programs read
            del values[name]
    lines = ",\n".join(f'"{name}": {value}' for name, value in values.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def shipped_golden(model: str) -> Path:
    """Return the path of the shipped golden file of a model."""
    return Path(__file__).parent / f"golden_{re.sub(r'[^a-z0-9]+', '_', model.lower()).strip('_')}.json"


def is_same_machine(golden: Golden, fingerprint: Mapping[str, object]) -> bool:
    return dict(fingerprint) == dict(golden.fingerprint)
