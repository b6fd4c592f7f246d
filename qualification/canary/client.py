"""The canary's requests to a server, over HTTP alone."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from qualification.canary.golden import GoldenRequest, MixAnswer
from qualification.canary.numerics import Scores
from qualification.receipt.replay import ReplayServer

_PREFIX = "hallmark_"
_SCORED = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
# What must not grow while a canary runs: metric -> (what to call it, the label values that count; none: all).
_WATCHED: dict[str, tuple[str, Mapping[str, str]]] = {
    "attention_fallback_total": ("fallbacks", {}),
    "requests_total": ("server errors", {"outcome": "server_error"}),
    "kernel_compiles_total": ("compiles after ready", {"after_ready": "true"}),
    "nonfinite_logits_total": ("non-finite logits", {}),
    "engine_restarts_total": ("engine restarts", {}),
}


class CanaryError(Exception):
    """The candidate cannot be reached, or answers what no server of ours would; one clear line."""


class RequestFailed(CanaryError):
    """One generation was refused or broke off; others may work."""


class RequestTimedOut(RequestFailed):
    """The server took it and gave no answer in time."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int


class Candidate:
    """The server under test. `admin` serves /attention and /metrics: the same port, unless the operator moved them."""

    def __init__(self, public: httpx2.Client, admin: httpx2.Client) -> None:
        self._public = public
        self._admin = admin
        self._salt = uuid.uuid4().hex  # so that the prefix cache of an earlier run answers for no kernel

    def replays(self) -> ReplayServer:
        """The same server, which computes answers of receipts again."""
        return ReplayServer(self._public, self._admin)

    def model(self) -> Model:
        body = self._get_json(self._public, "/v1/models")
        data = body.get("data")
        entry = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        name, length = entry.get("id"), entry.get("max_model_len")
        if not isinstance(name, str) or not isinstance(length, int):
            raise CanaryError("/v1/models names no model with its max_model_len: is the server ready?")
        return Model(name, length)

    def attention(self) -> dict[str, object]:
        return self._get_json(self._admin, "/attention")

    def tokenize(self, text: str) -> list[int]:
        body = self._post("/tokenize", {"prompt": text})
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CanaryError("/tokenize returned no tokens")
        return tokens

    def complete(self, token_ids: list[int], max_tokens: int) -> str:
        """The greedy answer. Raises RequestFailed."""
        body = self._post("/v1/completions", self._greedy(token_ids, max_tokens))
        choices = body.get("choices")
        text = choices[0].get("text") if isinstance(choices, list) and choices else None
        if not isinstance(text, str):
            raise RequestFailed("/v1/completions returned no text")
        return text

    def score(self, token_ids: list[int]) -> Scores:
        """The log probability of each token after the first, given those before it. Raises RequestFailed."""
        body = self._post("/v1/completions", self._greedy(token_ids, 0) | _SCORED)
        choices = body.get("choices")
        try:
            found = choices[0]["logprobs"]  # type: ignore[index]
            tokens, logprobs, likeliest = (found[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            ids = [_token_id(token) for token in tokens]
            if ids != token_ids or len(logprobs) != len(ids) or len(likeliest) != len(ids):
                raise RequestFailed("/v1/completions gave log probabilities of other tokens")
            return Scores([None if value is None else float(value) for value in logprobs[1:]], _likeliest(likeliest))
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            raise RequestFailed("/v1/completions gave no log probabilities of the prompt") from error

    def answer(self, request: GoldenRequest) -> GoldenRequest:
        """Return a request of a mix with what the server answers. Raises RequestFailed."""
        is_chat = "messages" in request.body
        more: dict[str, object] = {} if is_chat else {"logprobs": 0, "return_tokens_as_token_ids": True}
        body = self._post(request.path, request.body | more | {"cache_salt": self._salt + request.salt})
        try:
            choices: Any = body["choices"]
            usage: Any = body["usage"]
            answers = [_chat_answer(choice) if is_chat else _answer(choice) for choice in choices]
            return msgspec.structs.replace(request, num_prompt_tokens=int(usage["prompt_tokens"]), answers=answers)
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            raise RequestFailed(f"{request.path} gave no answer with tokens and usage") from error

    def counters(self) -> dict[str, float]:
        """Return the counters that must not grow, by name; one that /metrics does not have is absent."""
        try:
            response = self._admin.get("/metrics", headers={"accept": "text/plain; version=0.0.4"})
            response.raise_for_status()
            families = list(text_string_to_metric_families(response.text))
        except (httpx2.HTTPError, ValueError) as error:
            raise CanaryError(f"{_base(self._admin)}/metrics cannot be read: {_text(error)}") from error
        # A counter without any label set yet has a family and no sample: it stands at 0.
        known = {f"{family.name.removesuffix('_total')}_total": 0.0 for family in families}
        found = {what: known[_PREFIX + name] for name, (what, _) in _WATCHED.items() if _PREFIX + name in known}
        for sample in (sample for family in families for sample in family.samples):
            what, labels = _WATCHED.get(sample.name.removeprefix(_PREFIX), ("", {}))
            if what and labels.items() <= sample.labels.items():
                found[what] += sample.value
        return found

    def _get_json(self, client: httpx2.Client, path: str) -> dict[str, object]:
        try:
            response = client.get(path)
            response.raise_for_status()
            body = response.json()
        except (httpx2.HTTPError, ValueError, RecursionError) as error:
            raise CanaryError(f"{_base(client)}{path}: {_text(error)}") from error
        if not isinstance(body, dict):
            raise CanaryError(f"{path} returned no JSON object")
        return body

    def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        try:
            response = self._public.post(path, json=body)
            response.raise_for_status()
            answer = response.json()
        except httpx2.TimeoutException as error:
            raise RequestTimedOut(f"{path}: {_text(error)}") from error
        except (httpx2.HTTPError, ValueError, RecursionError) as error:
            raise RequestFailed(f"{path}: {_text(error)}") from error
        if not isinstance(answer, dict):
            raise RequestFailed(f"{path} returned no JSON object")
        return answer

    def _greedy(self, token_ids: list[int], max_tokens: int) -> dict[str, object]:
        wanted = {"prompt": token_ids, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        return wanted | {"cache_salt": self._salt}


def watched() -> tuple[str, ...]:
    """The names of the counters that `counters` reads."""
    return tuple(what for what, _ in _WATCHED.values())


def _chat_answer(choice: Any) -> MixAnswer:
    message = choice["message"]
    return MixAnswer(f"{message.get('reasoning_content') or ''}{message['content'] or ''}")


def _answer(choice: Any) -> MixAnswer:
    scores = choice["logprobs"]
    logprobs = [round(float(value), 5) for value in scores["token_logprobs"]]
    return MixAnswer(choice["text"], [_token_id(token) for token in scores["tokens"]], logprobs)


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _likeliest(places: list[dict[str, float | None]]) -> list[int | None]:
    """The token of the largest log probability at each place after the first; None where none is finite."""
    found: list[int | None] = []
    for place in places[1:]:
        finite = {name: value for name, value in place.items() if value is not None}
        found.append(_token_id(max(finite, key=finite.__getitem__)) if finite else None)
    return found


def _base(client: httpx2.Client) -> str:
    return str(client.base_url).rstrip("/")


def _text(error: Exception) -> str:
    """One line of an httpx2 error, which may have several or none."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
