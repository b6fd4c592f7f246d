"""The pages at / and /docs: who gets them, and under which policy."""

import hashlib
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import httpx2
import pytest

from server.http.app import create_admin_app
from server.http.page.route import policy_of, whole_page
from support.api.edge_fakes import served, with_keys

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "server" / "http" / "page"
PAGE, DOCS = whole_page("page.html"), whole_page("docs.html")
OURS = [path for path in FOLDER.iterdir() if path.suffix in {".html", ".css", ".js"}]
# npm's marked 18.2.1, lib/marked.umd.js
MARKED = "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542"
each_page = pytest.mark.parametrize(("path", "page"), [("/", PAGE), ("/docs", DOCS)])


@each_page
def test_the_page_needs_no_key_and_may_run_only_its_own_scripts(folder: Path, path: str, page: str) -> None:
    answer = with_keys(served(folder), "secret").get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == page
    assert '<link rel="stylesheet"' not in page
    assert "<script src" not in page
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "trusted-types 'none'" in policy
    assert "unsafe" not in policy
    assert policy == policy_of(page)
    assert policy.count("sha256-") == page.count("<script>") + page.count("<style>")


def test_a_changed_script_has_another_policy() -> None:
    assert policy_of(PAGE) != policy_of(PAGE.replace('"use strict";', '"use strict"; ', 1))


def test_the_pages_ask_for_nothing_from_elsewhere() -> None:
    assert len(OURS) > 8
    for file in OURS:
        text = file.read_text()
        urls = set(re.findall(r"https?://[\w./]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, file  # a name, which is not fetched
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", text), file


def test_the_vendored_library_is_as_published_with_its_licence() -> None:
    assert hashlib.sha256((FOLDER / "vendored" / "marked.js").read_bytes()).hexdigest() == MARKED
    assert "Permission is hereby granted" in (FOLDER / "vendored" / "marked.LICENSE").read_text()
    assert "(MIT License)" in PAGE  # its notice goes with each copy


def test_every_file_of_the_pages_is_part_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    assert len(files) > 10
    assert [path for path in files if not any(fnmatch(path.name, pattern) for pattern in data)] == []


@pytest.mark.anyio
async def test_the_admin_port_has_the_page_too(folder: Path) -> None:
    it = served(folder, admin_port=9000)
    app = create_admin_app(replace(it.services))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/")).text == PAGE
        assert (await client.get("/docs")).text == DOCS
