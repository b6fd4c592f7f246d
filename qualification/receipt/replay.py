"""Compute a receipt's answers again, over HTTP alone, and compare them token by token."""

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from qualification.receipt.content import (
    Bindings,
    Content,
    ReceiptAnswer,
    ReceiptGrammar,
    ReceiptSampling,
    UsedDecision,
)
from qualification.receipt.keys import KeyFormatError, PublicKey, public_key_of_text
from qualification.receipt.signed import FIELD, ReceiptError, logprobs_of, receipt_of

_COMPLETIONS = "/v1/completions"
_PROBED_TOKEN = 0  # in every vocabulary
_PROMPT_PHASES, _LATER_PHASES = ("prefill", "extend"), ("decode", "verify")
ATTENTION_PHASES = (*_PROMPT_PHASES, *_LATER_PHASES)


class ServerError(Exception):
    """The server cannot be reached, or answers what no server of ours would; one clear line."""


class RefusedReplay(Exception):
    """The server refuses to compute an answer of these parameters; one clear line."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which an answer that was computed again is another one."""

    answer: int  # its place in the receipt
    position: int  # of the token in the answer
    what: str  # the receipt's value and the server's


@dataclass(frozen=True, slots=True)
class Replayed:
    """One answer, computed again."""

    num_tokens: int
    has_logprobs: bool  # they were compared too
    difference: Difference | None
    content: Content | None  # of the receipt of this time; None where the server gives none


class ReplayServer:
    """The server that computes answers again."""

    def __init__(self, public: httpx2.Client, admin: httpx2.Client) -> None:
        """`admin` has /version: the same port, unless the operator moved it."""
        self._public = public
        self._admin = admin

    def keys(self) -> list[PublicKey]:
        """The keys of receipts since the server's start. Raises ServerError."""
        path = "/version"
        try:
            response = self._admin.get(path)
            if response.status_code in (401, 403):
                raise ServerError(f"{path} needs an operator's key: give --api-key-file, --admin-url or --key")
            response.raise_for_status()
            listed = response.json().get("receipt_keys", [])
            return [public_key_of_text(entry["public_key"]) for entry in listed]
        except (httpx2.HTTPError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, KeyFormatError):
                raise ServerError(f"{path}: {error}") from error
            raise ServerError(f"{_base(self._admin)}{path}: {_line(error)}") from error

    def identity(self) -> Content | None:
        """The server as a receipt of it names it; None where it gives none. Raises ServerError and RefusedReplay."""
        body = {"prompt": [_PROBED_TOKEN], "max_tokens": 1, "temperature": 0.0, FIELD: True}
        try:
            answer = self._complete(body)
        except RefusedReplay as refusal:
            if FIELD in str(refusal):
                return None
            raise
        return _content_of(answer)

    def answer(self, token_ids: Sequence[int], max_tokens: int, sampling: Mapping[str, float]) -> dict[str, Any]:
        """The receipt of a new answer, with its log probabilities. Raises ServerError and RefusedReplay."""
        body = {"prompt": token_ids, "max_tokens": max_tokens, "logprobs": 0, "cache_salt": secrets.token_hex(16)}
        answer = self._complete({**body, **sampling, FIELD: True})
        _content_of(answer)
        found: dict[str, Any] = answer[FIELD]
        return found

    def replay(self, content: Content, place: int, *, has_receipts: bool) -> Replayed:
        """Compute an answer again, alone and without what is cached of its prompt.

        Raises ServerError and RefusedReplay; ReceiptError for a receipt without token ids.
        """
        answer = content.answers[place]
        body = body_of(content, place)
        if has_receipts:
            body[FIELD] = True
        found = self._complete(body)
        token_ids, logprobs = _served(found)
        difference = _difference(place, answer, token_ids, logprobs)
        return Replayed(
            answer.num_tokens, answer.logprobs is not None, difference, _content_of(found) if has_receipts else None
        )

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._public.post(_COMPLETIONS, json=body)
            answer = response.json()
        except (httpx2.HTTPError, ValueError, RecursionError) as error:
            raise ServerError(f"{_base(self._public)}{_COMPLETIONS}: {_line(error)}") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{_COMPLETIONS} returned no JSON object")
        if response.status_code == 200:
            return answer
        envelope = answer.get("error")
        message = envelope.get("message") if isinstance(envelope, dict) else None
        line = f"{_COMPLETIONS} answers {response.status_code}: {_line(message or 'no reason')}"
        if response.status_code in (400, 404, 413, 422):
            raise RefusedReplay(line)
        raise ServerError(line)


def body_of(content: Content, place: int) -> dict[str, Any]:
    """The body of /v1/completions that computes an answer again. Raises ReceiptError for one without token ids.

    It asks for exactly so many tokens as the answer has: where it had ended there, the last of them is the end token.
    """
    answer = content.answers[place]
    prompt, sampling = content.prompts[answer.prompt], answer.sampling
    if prompt.token_ids is None or answer.token_ids is None or sampling.bindings is None:
        raise ReceiptError("it holds no token ids (--no-receipt-token-ids): the answer cannot be computed again")
    if not prompt.token_ids or not answer.token_ids:
        raise ReceiptError(f"it is malformed: answers[{place}] has no tokens")
    body: dict[str, Any] = {
        "prompt": prompt.token_ids,
        "max_tokens": answer.num_tokens,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(16),
        **_sampled(sampling, sampling.bindings, answer.num_tokens),
    }
    if answer.logprobs is not None:
        body["logprobs"] = 0
    return body


def decisions_at(decisions: Sequence[UsedDecision], position: int) -> list[str]:
    """The decisions that may have computed the token at a position of an answer, as text.

    A prompt whose last token alone was not in the prefix cache is computed as decoding is.
    """
    has_prompt = any(it.phase in _PROMPT_PHASES for it in decisions)
    others: tuple[str, ...] = _PROMPT_PHASES
    if position == 0:
        others = _LATER_PHASES if has_prompt else ()
    return [
        f"{it.phase} {it.path} ({', '.join((it.status, *it.fallback_reasons))}; order {it.order or 'none'}, "
        f"sources {(it.source_digest or 'unknown')[:12]})"
        for it in decisions
        if it.phase not in others
    ]


def _sampled(sampling: ReceiptSampling, bindings: Bindings, num_tokens: int) -> dict[str, Any]:
    try:
        body: dict[str, Any] = {
            name: float(getattr(sampling, name))
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
        }
        body["logit_bias"] = {str(token_id): float(bias) for token_id, bias in bindings.logit_bias}
        if sampling.seed is not None:
            body["seed"] = int(sampling.seed)
    except ValueError:
        raise ReceiptError("it is malformed: a sampling parameter is no number") from None
    body |= {
        "min_tokens": min(sampling.min_tokens, num_tokens),
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
    }
    if bindings.allowed_token_ids:
        body["allowed_token_ids"] = bindings.allowed_token_ids
    exact: dict[str, Any] = {"bad_words": bindings.bad_words} if bindings.bad_words else {}
    if bindings.grammar is not None:
        exact["grammar"] = _grammar(bindings.grammar)
    return body | ({"exact_sampling": exact} if exact else {})


def _grammar(grammar: ReceiptGrammar) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": grammar.kind, "text": grammar.text, "tokens": grammar.tokens}
    if grammar.before is not None:
        found["before"] = {"text": grammar.before.text, "tokens": grammar.before.tokens}
    return found


def _served(answer: Mapping[str, Any]) -> tuple[list[int], bytes | None]:
    """Token ids and packed log probabilities of an answer to `body_of`. Raises ServerError."""
    try:
        [choice] = answer["choices"]
        token_ids, found = msgspec.convert(choice["token_ids"], list[int]), choice["logprobs"]
        if found is None:
            return token_ids, None
        values = found["token_logprobs"]
        return token_ids, struct.pack(f"<{len(values)}f", *values)
    except (LookupError, ValueError, TypeError, struct.error, OverflowError) as error:
        raise ServerError(f"{_COMPLETIONS} returned no token ids: {_line(error)}") from error


def _difference(
    place: int, answer: ReceiptAnswer, token_ids: Sequence[int], logprobs: bytes | None
) -> Difference | None:
    expected_ids, expected = answer.token_ids or [], logprobs_of(answer)
    for position, token_id in enumerate(expected_ids):
        if position >= len(token_ids):
            return Difference(place, position, f"token {token_id} in the receipt, the answer has ended now")
        if token_ids[position] != token_id:
            return Difference(place, position, f"token {token_id} in the receipt, token {token_ids[position]} now")
        if expected is None:
            continue
        before, now = (None if it is None else it[4 * position : 4 * position + 4] for it in (expected, logprobs))
        if before != now:
            return Difference(
                place, position, f"token {token_id} of log probability {_value(before)}, {_value(now)} now"
            )
    if len(token_ids) > len(expected_ids):
        return Difference(place, len(expected_ids), "the end of the answer in the receipt, another token now")
    return None


def _value(packed: bytes | None) -> str:
    return f"{struct.unpack('<f', packed)[0]:.9g}" if packed else "none"


def _content_of(answer: Mapping[str, Any]) -> Content | None:
    """The content of an answer's receipt; None where it has none, as a server's before there were any."""
    if answer.get(FIELD) is None:
        return None
    try:
        return receipt_of(answer[FIELD]).content
    except ReceiptError as error:
        raise ServerError(f"{_COMPLETIONS} returned a receipt that cannot be read: {error}") from error


def _base(client: httpx2.Client) -> str:
    return str(client.base_url).rstrip("/")


def _line(error: object) -> str:
    """One line of an error, which may have several or none."""
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
