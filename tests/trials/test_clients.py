"""`make test-clients` without its clients: the pinned list, the page, and what is made of a script's end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from run_clients import (
    CALLS,
    LONG_CONTEXT,
    NEVER,
    NOT_RUN,
    PAGE,
    Client,
    Deadline,
    Result,
    call,
    failures_of,
    lines_of,
    long_demo,
    order_of,
    page,
    pinned,
    prepare,
    rows_of,
)
from running_server import DEMO
from tokenizers import Tokenizer

CLIENT = Client("a client", "a", ("a==1.2",), "a_calls.py", limit_s=20)


CHAT = """print('{"call": "chat", "why": null}', flush=True)"""  # a script's report of a call


def ran(tmp_path: Path, code: str, limit_s: int = 20, deadline: Deadline = NEVER) -> Result:
    script = tmp_path / "script.py"
    script.write_text(code)
    client = Client("a client", "a", ("a==1.2",), "a_calls.py", limit_s=limit_s)
    return call(client, [sys.executable, str(script)], tmp_path, {"HALLMARK_URL": "http://127.0.0.1:1"}, deadline)


def test_page_has_a_row_for_each_pinned_client() -> None:
    rows = [(name, version) for name, version, _ in rows_of(PAGE.read_text())]
    assert rows == [(client.name, client.version) for client in pinned()], "run make test-clients"


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


def test_the_order_changes_by_the_day_and_leaves_nobody_out() -> None:
    """So that each client is among the first ones, which a gate with little time runs, within two months."""
    clients = pinned()
    orders = [[client.folder for client in order_of(clients, day)] for day in range(740_000, 740_060)]
    assert all(sorted(order) == sorted(client.folder for client in clients) for order in orders)
    assert all(order != following for order, following in pairwise(orders))
    assert {folder for order in orders for folder in order[:5]} == {client.folder for client in clients}


def test_the_demo_for_agents_differs_by_its_context_and_ends(tmp_path: Path) -> None:
    folder = long_demo(tmp_path / "long")
    assert {path.name for path in DEMO.iterdir() if path.suffix in (".json", ".safetensors")} <= {
        path.name for path in folder.iterdir()
    }
    config = json.loads((DEMO / "config.json").read_text())
    assert json.loads((folder / "config.json").read_text()) == config | {"max_position_embeddings": LONG_CONTEXT}
    ends = set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ends >= set(config["eos_token_id"])
    assert {tokenizer.id_to_token(number)[0] for number in ends - set(config["eos_token_id"])} == set(".!?")


def test_a_failed_call_is_named_with_its_reason(tmp_path: Path) -> None:
    result = ran(tmp_path, """print('noise\\n{"call": "chat", "why": null}\\n{"call": "tools", "why": "400: no"}')""")
    assert (result.verdict, result.failures) == ("fails: tools", {"tools": "400: no"})


@pytest.mark.parametrize(
    ("code", "limit_s", "why"),
    [
        ("raise SystemExit('no module')", 60, "ended with 1: no module"),
        ("pass", 60, "ended with 0: no output"),
        ("""import time; print('{"call": "chat", "why": null}'); time.sleep(60)""", 1, "not done within 1 s"),
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


def run_of_openai(tmp_path: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program on one client and a server that does not answer."""
    nowhere = ["--url", "http://127.0.0.1:1", "--embed-url", "http://127.0.0.1:1", "--cache", str(tmp_path)]
    program = [sys.executable, str(CALLS.parent / "run_clients.py"), "openai", *flags, *nowhere]
    environment = os.environ | {"PYTHONPATH": str(CALLS.parents[1])} | environ
    command = [*program, "--page", str(tmp_path / "page.md")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_client_that_has_not_begun_in_time_is_named(tmp_path: Path) -> None:
    done = run_of_openai(tmp_path, "--time-limit", "0")
    assert "NOT RUN openai (Python): out of time" in done.stdout
    assert rows_of((tmp_path / "page.md").read_text())[0][2] == "not run: out of time"
    assert done.returncode == 0


def test_the_last_line_names_who_cannot_be_installed(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    offline = {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(folder), "UV_CACHE_DIR": str(folder)}
    done = run_of_openai(tmp_path, **offline)
    assert done.stdout.splitlines()[-1].startswith("0 of 1 clients work, 1 NOT RUN (openai (Python)), in ")
    assert done.returncode == 0


def test_a_script_that_the_deadline_ends_is_not_run(tmp_path: Path) -> None:
    result = ran(tmp_path, f"{CHAT}; import time; time.sleep(60)", deadline=Deadline(time.monotonic() + 0.5))
    assert (result.verdict, result.calls) == ("not run: out of time", {})


def test_what_a_script_has_started_ends_with_it(tmp_path: Path) -> None:
    pid, child = tmp_path / "pid", tmp_path / "child.py"
    child.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(300)")
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        f"subprocess.Popen([sys.executable, {str(child)!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"pid = Path({str(pid)!r})\n"
        "while not pid.exists() or '.' not in pid.read_text(): time.sleep(0.05)"
    )
    ran(tmp_path, code, limit_s=60)
    number = int(pid.read_text().removesuffix("."))
    end = time.monotonic() + 20
    while is_running(number) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(number)


def is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_call_that_failed_before_the_deadline_counts(tmp_path: Path) -> None:
    code = f"{CHAT.replace('null', '400')}; import time; time.sleep(60)"
    assert ran(tmp_path, code, deadline=Deadline(time.monotonic() + 1.5)).verdict == "fails: chat"


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
