"""`make test-clients` without its clients: the pinned list, the page, and what is made of a script's end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from run_clients import (
    CALLS,
    NOT_RUN,
    PAGE,
    Client,
    Result,
    call,
    failures_of,
    lines_of,
    page,
    pinned,
    prepare,
    rows_of,
)

CLIENT = Client("a client", "a", ("a==1.2",), "a_calls.py", limit_s=20)


def ran(tmp_path: Path, code: str, limit_s: int = 20) -> Result:
    script = tmp_path / "script.py"
    script.write_text(code)
    client = Client("a client", "a", ("a==1.2",), "a_calls.py", limit_s=limit_s)
    return call(client, [sys.executable, str(script)], tmp_path, {"HALLMARK_URL": "http://127.0.0.1:1"})


def test_page_has_a_row_for_each_pinned_client() -> None:
    rows = [(name, version) for name, version, _ in rows_of(PAGE.read_text())]
    assert rows == [(client.name, client.version) for client in pinned()], "run make test-clients"


def test_every_row_says_what_became_of_it() -> None:
    results = [result for _, _, result in rows_of(PAGE.read_text())]
    assert all(result == "works" or result.startswith(("fails: ", f"{NOT_RUN}: ")) for result in results)


def test_every_pinned_client_has_an_exact_version_and_a_script() -> None:
    clients = pinned()
    assert len({client.folder for client in clients}) == len(clients)
    for client in clients:
        assert all(package.rpartition("@" if client.is_npm else "==")[2][0].isdigit() for package in client.packages)
        assert (CALLS / client.script).is_file()


def test_every_lock_pins_its_client_and_all_else() -> None:
    for client in pinned():
        text = client.lock.read_text()
        if client.is_npm:
            found = {
                name.removeprefix("node_modules/"): it for name, it in json.loads(text)["packages"].items() if name
            }
            assert all(it["integrity"] for it in found.values())
            assert all(found[name]["version"] == version for name, version in split(client.packages, "@"))
        else:
            lines = dict(split(text.splitlines(), "=="))
            assert all(version[0].isdigit() for version in lines.values())
            assert all(lines[name] == version for name, version in split(client.packages, "==")), client.name


def split(packages: Iterable[str], mark: str) -> list[tuple[str, str]]:
    parts = (package.rpartition(mark) for package in packages)
    return [(name.partition("[")[0].lower().replace("_", "-"), version) for name, _, version in parts]


def test_a_failed_call_is_named_with_its_reason(tmp_path: Path) -> None:
    result = ran(tmp_path, """print('noise\\n{"call": "chat", "why": null}\\n{"call": "tools", "why": "400: no"}')""")
    assert (result.verdict, result.failures) == ("fails: tools", {"tools": "400: no"})


@pytest.mark.parametrize(
    ("code", "limit_s", "why"),
    [
        ("raise SystemExit('no module')", 60, "ended with 1: no module"),
        ("pass", 60, "ended with 0: no output"),
        ("""import time; print('{"call": "chat", "why": null}'); time.sleep(60)""", 2, "not done within 2 s"),
    ],
)
def test_a_script_that_breaks_off_does_not_pass(tmp_path: Path, code: str, limit_s: int, why: str) -> None:
    result = ran(tmp_path, code, limit_s=limit_s)
    assert (result.verdict, result.failures) == ("fails: script", {"script": why})


def test_what_cannot_be_installed_is_not_run(tmp_path: Path) -> None:
    missing = Client("none", "none", ("/no/such/package==1",), "a_calls.py", limit_s=20, without_dependencies=True)
    why = prepare(missing, tmp_path)
    assert why is not None
    assert "cannot be installed here" in why
    assert Result(missing, {}, not_run=why).verdict == f"{NOT_RUN}: {why}"


def test_a_client_that_has_not_begun_in_time_is_named(tmp_path: Path) -> None:
    nowhere = ["--url", "http://127.0.0.1:1", "--embed-url", "http://127.0.0.1:1", "--cache", str(tmp_path)]
    flags = ["openai", "--time-limit", "0", "--page", str(tmp_path / "page.md"), *nowhere]
    program = [sys.executable, str(CALLS.parent / "run_clients.py"), *flags]
    environ = os.environ | {"PYTHONPATH": str(CALLS.parents[1])}
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "NOT RUN openai (Python): the 0 s of this run had passed" in done.stdout
    assert [result for _, _, result in rows_of((tmp_path / "page.md").read_text())] == [
        "not run: the 0 s of this run had passed"
    ]


def test_the_page_is_read_as_it_is_written() -> None:
    other = replace(CLIENT, name="another")
    results = [Result(CLIENT, {"chat": None, "tools": "400"}), Result(other, {}, not_run="npm is not installed")]
    assert rows_of(page(results, "2026-11-23")) == [
        ("a client", "1.2", "fails: tools"),
        ("another", "1.2", "not run: npm is not installed"),
    ]


def test_failures_are_known_from_the_page() -> None:
    results = [Result(CLIENT, {"chat": None, "tools": "400", "parse": "400"})]
    assert failures_of(page(results, "2026-11-23")) == {"a client": ["tools", "parse"]}
    assert failures_of(page([Result(CLIENT, {"chat": None})], "2026-11-23")) == {}


def test_a_run_of_some_clients_keeps_the_rows_of_others() -> None:
    first, second, *_ = pinned()
    whole = page([Result(first, {"chat": None}), Result(second, {"chat": "400"})], "2026-11-23")
    after = page([Result(second, {"chat": None})], "2026-11-24", lines_of(whole))
    assert [row[2] for row in rows_of(after)] == ["works", "works"]
    assert "2026-11-23" in lines_of(after)[first.name]
