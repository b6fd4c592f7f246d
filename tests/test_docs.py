"""Truth of the documents: tables, links, commands, endpoints and exit codes."""

import argparse
import importlib.util
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from qualification.common.exit_code import ExitCode
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.registry import FAMILIES
from server.cli.main import build_parser
from server.cli.parser import commands_of, options_of
from server.cli.published import PUBLISHED, UNPUBLISHED
from server.http.app import create_app
from server.http.pooling.routes import PATHS as POOLING_PATHS
from server.settings import PREFIX, Settings, Task
from server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
README_BYTES = 6 * 1024  # one screen that says what, for whom and how; the rest is a page of docs/
DOCS = ROOT / "docs"
LINKING = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
    *(ROOT / "server").rglob("*.md"),
    *(ROOT / "qualification").rglob("*.md"),
]

PAST = {DOCS / "decisions", DOCS / "experiments", DOCS / "benchmarks"}  # may name files of earlier commits
CURRENT = [path for path in LINKING if not PAST & set(path.parents) and path.name != "CHANGELOG.md"]


def script(name: str) -> ModuleType:
    """Load a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("tables")


def test_readme_fits_its_limit() -> None:
    assert len(README.read_bytes()) <= README_BYTES


def test_tables_are_what_the_code_says(tables: ModuleType) -> None:
    pages = [path.read_text() for path in tables.PAGES]
    for text in pages:
        assert tables.written(text) == text, "run .venv/bin/python docs/tables.py"
    for kind, names in (("table", tables.TABLES), ("list", tables.LISTS)):
        for name in names:
            assert any(f"<!-- {kind}: {name} -->" in text for text in pages)


def test_every_class_that_is_served_has_a_published_model() -> None:
    classes = [it.architectures for it in (*FAMILIES, *IMAGE_MODELS) if it.architectures]
    listed = {model.architecture for model in PUBLISHED} | {*UNPUBLISHED}
    missing = [names for names in classes if not listed & {*names}]
    assert missing == [], "add a line to server/cli/published.py and run .venv/bin/python docs/tables.py"


def test_edited_table_is_noticed(tables: ModuleType) -> None:
    text = (DOCS / "operate.md").read_text()
    edited = text.replace("| `le_128` | 1 to 128 |", "| `le_128` | 1 to 127 |")
    assert edited != text
    assert tables.written(edited) == text


def test_speed_in_the_readme_is_what_the_files_say() -> None:
    beside = script("beside_vllm")
    text = README.read_text()
    assert beside.written(text) == text, "run .venv/bin/python docs/tables.py"
    assert beside.CHART.read_text() == beside.chart(), "run .venv/bin/python docs/tables.py"
    run = json.loads((DOCS / "benchmarks" / "serve-llama8b.json").read_text())
    [ours] = [row["ttft_p50_ms"] for row in run["sides"][0]["rows"] if row["case"] == "ttft 8192"]
    assert f"{ours:.0f} / " in text
    assert beside.written(text.replace(f"{ours:.0f} / ", "1 / ")) == text


def anchors_of(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub names them: the second of one name ends in -1."""
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
def test_links_lead_to_files_and_headings(document: Path) -> None:
    assert broken_links(document, document.read_text()) == []


def test_broken_links_are_noticed() -> None:
    text = "# A `b`, 5 % (c)\n## Twice\n## Twice\n```\n# no heading\n```\n"
    assert anchors_of(text) == {"a-b-5--c", "twice", "twice-1"}
    links = "[a](#a-b-5--c) [b](#twice-1) [c](races.md#experiments-races) [d](https://x/#y)"
    wrong = ["#twice-2", "#no-heading", "races.md#no-such-heading", "no-such-file.md"]
    document = ROOT / "docs" / "experiments" / "README.md"
    assert broken_links(document, text + links) == []
    assert broken_links(document, text + links + "".join(f" [e]({link})" for link in wrong)) == wrong


def test_make_commands_are_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for path in LINKING for name in re.findall(r"\bmake (?:\w+=\S+ )?([a-z][\w-]*)\b", code_of(path))}
    assert named
    assert named <= targets


def code_of(path: Path) -> str:
    """Return the parts of a document that are set as code."""
    text = path.read_text()
    return "\n".join(re.findall(r"^    .*$|`[^`\n]+`", text, flags=re.MULTILINE))


def test_every_page_is_found_from_the_index() -> None:
    found = {DOCS / "README.md"}
    new = found
    while new:
        links = {(path.parent / link).resolve() for path in new for link in links_of(path)}
        new = {link for link in links if link.suffix == ".md" and link.is_relative_to(DOCS)} - found
        found = found | new
    assert set(DOCS.rglob("*.md")) - found == set()


def links_of(path: Path) -> set[str]:
    """Return the files that the relative links of a document lead to."""
    links = re.findall(r"\]\(([^)\s]+)", path.read_text())
    return {link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")}


def test_runbooks_are_all_listed() -> None:
    listed = {Path(link).name for link in links_of(DOCS / "operate.md") if "runbooks/" in link}
    assert listed == {path.name for path in (ROOT / "deploy" / "runbooks").glob("*.md")}


def test_source_paths_exist() -> None:
    """Paths of this repository that pages name in code, but for those that tell of the past."""
    name = r"`((?:kernels|qualification|server|deploy|tests|docs)/[\w./-]*)`"
    named = {found for path in CURRENT for found in re.findall(name, path.read_text())}
    assert len(named) > 20
    assert {found for found in named if not (ROOT / found).exists()} == set()


def absent_names(text: str) -> list[str]:
    """Return each `Name` of the text's "`Name` in `file.py`" or "`Name` (`file.py`)" that its file does not have."""
    pairs = re.findall(r"`([A-Za-z_]\w*)`\s+(?:in\s+|\()`(\w+/[\w/]+\.py)`", text)
    return [
        f"{name} in {file}"
        for name, file in pairs
        if not (ROOT / file).exists() or not re.search(rf"\b{name}\b", (ROOT / file).read_text())
    ]


@pytest.mark.parametrize("document", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_hold_the_names(document: Path) -> None:
    assert absent_names(document.read_text()) == []


def test_absent_names_are_noticed() -> None:
    right = "`Settings` in `server/settings.py`, `Step` (`server/model/step.py`)"
    wrong = "`Limited` in `server/model/linear.py`, `Step` (`server/model/no_such_file.py`)"
    assert absent_names(right) == []
    assert absent_names(f"{right}, {wrong}") == [
        "Limited in server/model/linear.py",
        "Step in server/model/no_such_file.py",
    ]


def test_files_of_the_walk_exist() -> None:
    walk = (DOCS / "architecture.md").read_text().split("| station |")[1].split("\n\n")[0]
    folders = re.findall(r"`([\w/]+)/`: ([\w, ]+)", walk)
    files = {ROOT / folder / f"{name}.py" for folder, names in folders for name in names.strip().split(", ")}
    assert len(files) > 50
    assert {file for file in files if not file.exists()} == set()


def test_rooms_floors_and_arrows_are_counted() -> None:
    house = script("house")
    imports = {"a.low": set(), "a.mid.x": {"a.low", "json"}, "a.mid.y": {"a.mid.x"}, "a.top": {"a.mid.y", "a.low"}}
    assert house.count("a", imports) == (3, 3, 3)
    with pytest.raises(ValueError, match="circle"):
        house.count("a", imports | {"a.low": {"a.top"}})


def test_variables_are_settings() -> None:
    known = {f"{PREFIX}{field.name.upper()}" for field in msgspec.structs.fields(Settings)}
    named = {found for path in LINKING for found in re.findall(rf"\b{PREFIX}[A-Z_]+\b", path.read_text())}
    assert named - known == set()


def flags_of(parser: argparse.ArgumentParser, name: str = "hallmark") -> dict[str, set[str]]:
    """Return the flags of each command, by its full name."""
    found = {name: {flag for action in options_of(parser) for flag in action.option_strings}}
    for word, inner in commands_of(parser).items():
        found |= flags_of(inner, f"{name} {word}")
    return found


def test_commands_and_flags_exist() -> None:
    known = flags_of(build_parser())
    texts = [path.read_text().replace("\\\n", " ") for path in LINKING]
    name = r"\bhallmark (?:(?:bench|matrix) )?[a-z]+"
    written = [found for text in texts for found in re.findall(rf"({name}\b)([^\n`#|]*)", text)]
    begun = {found for text in texts for found in re.findall(rf"(?m)(?:^ *|`)({name}\b)", text)}
    assert {command for command in begun if command not in known} == set()
    flags = [(command, flag) for command, rest in written for flag in re.findall(r"(?<!\S)--[a-z0-9-]+", rest)]
    assert len(flags) > 40
    assert [(command, flag) for command, flag in flags if flag not in known.get(command, ())] == []


def test_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heading is not None
    assert version in heading[1]


def test_python_snippets_compile() -> None:
    snippets = [found for path in LINKING for found in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    assert snippets
    for snippet in snippets:
        compile(snippet, "a page", "exec")


def test_routes_are_those_of_the_application() -> None:
    metrics = Metrics("demo", CollectorRegistry(), version="0")
    engine = SimpleNamespace()
    services = SimpleNamespace(
        settings=Settings(),
        program=SimpleNamespace(version="0"),
        model=SimpleNamespace(template=None, pooling=None, task=Task.GENERATE),
        engine=engine,
        telemetry=SimpleNamespace(metrics=metrics),
        lifecycle=None,
    )
    app = create_app(services)
    paths = app.openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    served |= {f"POST {path}" for path in POOLING_PATHS}  # of servers of other tasks
    section = (DOCS / "api.md").read_text().split("\n## Routes\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", section)) == served


def test_exit_codes_of_the_canary_are_listed() -> None:
    table = (DOCS / "gate-a-deploy.md").read_text().split("| exit code | meaning |")[1].split("\n\n")[0]
    rows = {int(code): meaning for code, meaning in re.findall(r"\| (\d) \| ([^|]*) \|", table)}
    assert rows.keys() == {int(code) for code in ExitCode}
    for code in ExitCode:
        assert rows[code].startswith(code.name.lower())
