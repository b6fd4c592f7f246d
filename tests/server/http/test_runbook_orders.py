"""Orders of the runbooks, as an operator copies them, are taken."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from server.protocol.messages import AttestationReport
from support.api.edge_fakes import served

RUNBOOKS = Path(__file__).resolve().parents[3] / "deploy" / "runbooks"


def orders() -> list[argparse.Namespace]:
    """Every call of curl that is no GET."""
    curl = argparse.ArgumentParser()
    curl.add_argument("-s", action="store_true")
    curl.add_argument("-X", dest="method", required=True)
    curl.add_argument("-H", dest="header", default="")
    curl.add_argument("-d", dest="body", default="")
    curl.add_argument("url")
    lines = [line for page in sorted(RUNBOOKS.glob("*.md")) for line in page.read_text().splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("    curl ") and " -X " in line]
    return [curl.parse_args(of_line[1:]) for of_line in words]


@pytest.mark.parametrize("order", orders(), ids=lambda order: f"{order.method} {order.url}")
def test_an_order_as_a_runbook_writes_it_is_taken(folder: Path, order: argparse.Namespace) -> None:
    it = served(folder)
    it.engine.report = AttestationReport("request", "match", 1.0, 0.1, [], [])
    name, _, value = order.header.partition(": ")
    headers = {name: value} if name else {}
    path = order.url.removeprefix("$ADMIN")
    answer = it.request(order.method, path, content=order.body.encode(), headers=headers)
    assert answer.status_code == 200, answer.text


def test_an_address_in_a_runbook_is_at_the_port_that_it_names(folder: Path) -> None:
    pages = "\n".join(page.read_text() for page in RUNBOOKS.glob("*.md"))
    whole, api = served(folder), served(folder, admin_port=0)
    named = set(re.findall(r"(\$SERVER|\$ADMIN)(/[\w/]+)", pages))
    assert {whole.get(path).status_code for _, path in named} == {200, 405}
    there = {path for _, path in named if api.get(path).status_code != 404}
    assert {path for port, path in named if port == "$SERVER"} == there


def test_runbooks_have_orders() -> None:
    assert {order.method for order in orders()} == {"POST", "DELETE"}
