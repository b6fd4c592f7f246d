"""Pages of other origins: what a browser is told, of preflights, streams and refusals."""

from pathlib import Path

import httpx2
import pytest

from server.errors import SettingsError
from support.api.edge_fakes import Served, saying, served, with_keys
from support.api.running_api import Running

ORIGIN = "https://app.example"
COMPLETIONS = "/v1/completions"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def test_without_origins_no_answer_has_cors_headers(folder: Path) -> None:
    it = served(folder)
    answers = [it.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT), it.get("/v1/models", headers={"origin": ORIGIN})]
    assert [answer.status_code for answer in answers] == [405, 200]
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)


def test_a_preflight_needs_no_key_and_an_answer_does(folder: Path) -> None:
    it = with_keys(served(folder, allowed_origins=f"https://other.example, {ORIGIN}"), "right")
    preflight = it.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    refused = it.post(COMPLETIONS, {"prompt": "a"}, headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)  # the page reads why
    foreign = it.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT | {"origin": "https://evil.example"})
    assert (foreign.status_code, "access-control-allow-origin" in foreign.headers) == (400, False)


@pytest.mark.parametrize("num_choices", [1, 2])  # one goes straight to the connection, two through the application
def test_a_stream_has_cors_headers(folder: Path, num_choices: int) -> None:
    with Running(served(folder, saying("Hel", "lo"), allowed_origins="*")) as running:
        body = {"prompt": "a", "stream": True, "n": num_choices}
        answer = httpx2.post(running.url + COMPLETIONS, json=body, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.text.endswith("data: [DONE]\n\n")) == (200, True)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", ["app.example", f"{ORIGIN}/", f"{ORIGIN}/chat", "null", "https://*.example", ","])
def test_what_is_no_origin_stops_the_start(folder: Path, origins: str) -> None:
    with pytest.raises(SettingsError, match=r"^--allowed-origins: .* is no origin"):
        _ = served(folder, allowed_origins=origins).app


@pytest.mark.parametrize("file", ["api_key_file", "operator_key_file"])
def test_any_origin_is_refused_beside_keys(folder: Path, file: str) -> None:
    it: Served = served(folder, allowed_origins=ORIGIN, **{file: "keys"})
    assert it.get("/livez").status_code == 200
    with pytest.raises(SettingsError, match=r"^--allowed-origins \* is refused where there are API keys"):
        _ = served(folder, allowed_origins=f"{ORIGIN},*", **{file: "keys"}).app
