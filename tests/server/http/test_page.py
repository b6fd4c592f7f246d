"""The pages at / and /docs: who gets them, and under which policy."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from server.http.app import create_admin_app
from server.http.page.route import policy_of
from support.api.edge_fakes import served, with_keys

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "server" / "http" / "page"
PAGE, DOCS = FOLDER / "page.html", FOLDER / "docs.html"
each_page = pytest.mark.parametrize(("path", "file"), [("/", PAGE), ("/docs", DOCS)])


@each_page
def test_the_page_needs_no_key_and_may_run_only_its_own_script(folder: Path, path: str, file: Path) -> None:
    answer = with_keys(served(folder), "secret").get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == file.read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy == policy_of(answer.text)


def test_a_changed_script_has_another_policy() -> None:
    page = PAGE.read_text()
    assert policy_of(page) != policy_of(page.replace('"use strict";', '"use strict"; '))


@each_page
def test_the_page_asks_for_nothing_from_elsewhere(path: str, file: Path) -> None:  # noqa: ARG001
    page = file.read_text()
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, which is not fetched
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", page)


def test_the_page_is_part_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "*.html" in data["*"]


@pytest.mark.anyio
async def test_the_admin_port_has_the_page_too(folder: Path) -> None:
    it = served(folder, admin_port=9000)
    app = create_admin_app(replace(it.services))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/")).content == PAGE.read_bytes()
        assert (await client.get("/docs")).content == DOCS.read_bytes()
