"""The header Host: malformed ones, and names that a server does not answer to."""

from pathlib import Path

import pytest

from server.edge.hosts import allowed_hosts
from server.errors import SettingsError
from server.http.app import create_admin_app
from support.api.edge_fakes import Served, served, with_keys
from support.api.running_api import Running

LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "[0:0::1]"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[::2]"]
MALFORMED = [
    "", "a b", "a,localhost", "localhost:x", "localhost:123456", "http://localhost", "user@localhost", "[::1", "[:]",
]  # fmt: skip


def status_of(it: Served, host: str, path: str = "/v1/models") -> int:
    return it.get(path, headers={"host": host}).status_code


@pytest.mark.parametrize(
    ("settings", "answered", "refused"),
    [
        ({}, LOOPBACK, FOREIGN),
        ({"host": "127.0.0.5"}, ["127.0.0.5:80"], ["127.0.0.6"]),
        ({"host": "0.0.0.0"}, ["evil.example"], []),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example, 10.0.0.7,::2"},
            ["API.example:443", "10.0.0.7", "[::2]:80"], ["www.api.example", "localhost", "10.0.0.8"]),
        ({"allowed_hosts": "a,*"}, ["evil.example"], []),
    ],
)  # fmt: skip
def test_a_server_answers_to_its_names_only(
    folder: Path, settings: dict[str, str], answered: list[str], refused: list[str]
) -> None:
    it = served(folder, **settings)
    expected = dict.fromkeys(answered, 200) | dict.fromkeys(refused, 400)
    assert {host: status_of(it, host) for host in expected} == expected


def test_a_refused_host_is_told_the_names_and_the_flag(folder: Path) -> None:
    answer = served(folder).get("/v1/models", headers={"host": "evil.example"}).json()["error"]
    assert answer["code"] == "invalid_header"
    assert answer["message"].startswith("This server does not answer to the host 'evil.example', only to localhost, ")
    assert "--allowed-hosts" in answer["message"]


def test_each_way_in_is_held_to_the_names(folder: Path) -> None:
    it = served(folder)
    asked = {"host": "evil.example"}
    assert it.post("/v1/completions", {"prompt": "a"}, headers=asked).status_code == 400
    assert it.post("/attention/quarantine", {"path": "sdpa.cpu"}, headers=asked).status_code == 400
    it.app = create_admin_app(it.services)  # type: ignore[assignment]
    assert it.post("/attention/quarantine", {"path": "sdpa.cpu"}, headers=asked).status_code == 400
    assert it.engine.quarantine.by_operator == []


def test_with_keys_any_name_is_allowed(folder: Path) -> None:
    asked = {"host": "evil.example", "authorization": "Bearer right"}
    assert with_keys(served(folder), "right").get("/v1/models", headers=asked).status_code == 200


def test_probes_may_ask_by_any_name(folder: Path) -> None:
    it = served(folder, allowed_hosts="api.example")
    assert [status_of(it, "10.1.2.3:8000", path) for path in ("/livez", "/readyz", "/health")] == [200] * 3


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_a_400_for_everyone(folder: Path, host: str) -> None:
    it = served(folder, host="0.0.0.0")
    assert [status_of(it, host, path) for path in ("/v1/models", "/livez")] == [400, 400]


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /livez HTTP/1.1\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", b"400"),
        (b"GET /livez HTTP/1.0\r\n", b"200"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"200"),
    ],
    ids=["missing", "doubled", "missing in HTTP/1.0", "one"],
)
def test_http_1_1_needs_one_host(folder: Path, request_head: bytes, status: bytes) -> None:
    with Running(served(folder)) as running, running.connect() as connection:
        connection.sendall(request_head + b"\r\n")
        assert connection.recv(4096).split()[1] == status


@pytest.mark.parametrize("setting", ["http://a", "a:80", "a,,b", "a b", "[::g]"])
def test_a_setting_that_names_no_host_is_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match=r"^--allowed-hosts: .* is no host name"):
        allowed_hosts(setting, "127.0.0.1", has_keys=False)
