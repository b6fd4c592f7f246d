"""What the documents say is so: tables, links, commands, endpoints and exit codes."""

import argparse
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from qualification.exit_code import ExitCode
from server.cli.main import build_parser
from server.http.app import create_app
from server.settings import Settings
from server.telemetry.metrics import Metrics
from server.telemetry.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
LINKING = [*DOCUMENTS, *(ROOT / "docs").glob("*/*.md"), *(ROOT / "server").rglob("*.md")]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_readme_are_what_the_code_says(tables: ModuleType) -> None:
    assert tables.written(README) == README, "run .venv/bin/python docs/tables.py"
    for name in tables.TABLES:
        assert f"<!-- table: {name} -->" in README
    for name in tables.LISTS:
        assert f"<!-- list: {name} -->" in README


def test_an_edited_table_would_be_noticed(tables: ModuleType) -> None:
    edited = README.replace("| `le_128` | 1 to 128 |", "| `le_128` | 1 to 127 |")
    assert edited != README
    assert tables.written(edited) == README


def anchors_of(text: str) -> set[str]:
    """Of its headings, as GitHub names them: the second of one name ends in -1."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} (.*)$", outside, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links of a document's text to a file that there is not, or to a heading that the file has not."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text() if path else text)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading_of_it(document: Path) -> None:
    assert broken_links(document, document.read_text()) == []


def test_a_link_to_a_heading_that_there_is_not_would_be_noticed() -> None:
    text = "# A `b`, 5 % (c)\n## Twice\n## Twice\n```\n# no heading\n```\n"
    assert anchors_of(text) == {"a-b-5--c", "twice", "twice-1"}
    links = "[a](#a-b-5--c) [b](#twice-1) [c](races.md#experiments-races) [d](https://x/#y)"
    wrong = ["#twice-2", "#no-heading", "races.md#no-such-heading", "no-such-file.md"]
    document = ROOT / "docs" / "experiments" / "README.md"
    assert broken_links(document, text + links) == []
    assert broken_links(document, text + links + "".join(f" [e]({link})" for link in wrong)) == wrong


def test_every_make_command_of_the_documents_is_a_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"\bmake (?:\w+=\S+ )?([a-z][\w-]*)\b", code_of(path))}
    assert named
    assert named <= targets


def code_of(path: Path) -> str:
    """The parts of a document that are set as code."""
    text = path.read_text()
    return "\n".join(re.findall(r"^    .*$|`[^`\n]+`", text, flags=re.MULTILINE))


def flags_of(parser: argparse.ArgumentParser, name: str = "hallmark") -> dict[str, set[str]]:
    """Of each command, by its full name."""
    found = {name: {flag for action in parser._actions for flag in action.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                found |= flags_of(inner, f"{name} {word}")
    return found


def test_every_flag_of_a_command_in_a_document_is_a_flag_of_that_command() -> None:
    known = flags_of(build_parser())
    texts = [path.read_text().replace("\\\n", " ") for path in (*DOCUMENTS, *(ROOT / "docs").glob("*/*.md"))]
    name = r"\bhallmark (?:(?:bench|matrix) )?[a-z]+"
    written = [found for text in texts for found in re.findall(rf"({name}\b)([^\n`#|]*)", text)]
    flags = [(command, flag) for command, rest in written for flag in re.findall(r"(?<!\S)--[a-z0-9-]+", rest)]
    assert len(flags) > 40
    assert [(command, flag) for command, flag in flags if flag not in known.get(command, ())] == []


def test_the_changelog_begins_with_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == version


def test_the_python_of_the_readme_compiles() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        compile(snippet, "README.md", "exec")


def test_the_endpoints_of_the_readme_are_those_of_the_application() -> None:
    metrics = Metrics("demo", Registry(), version="0")
    engine = SimpleNamespace()
    edge = SimpleNamespace(
        settings=Settings(), metrics=metrics, engine=engine, lifecycle=None, version="0", template=None
    )
    app = create_app(edge)
    paths = app.openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    served |= {f"POST {path}" for path in app.quick}
    section = README.split("\n## Endpoints\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", section)) == served


def test_the_exit_codes_of_the_canary_are_all_in_the_readme() -> None:
    table = README.split("| exit code | meaning |")[1].split("\n\n")[0]
    rows = {int(code): meaning for code, meaning in re.findall(r"\| (\d) \| ([^|]*) \|", table)}
    assert rows.keys() == {int(code) for code in ExitCode}
    for code in ExitCode:
        assert rows[code].startswith(code.name.lower())
