"""docs/metrics.md, the code, and all that asks for metrics name the same ones."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
# What may name a metric besides the code: rules, dashboards, runbooks, the canary that reads a server's metrics.
ASKING = [
    *(ROOT / "deploy").rglob("*.yml"),
    *(ROOT / "deploy").rglob("*.yaml"),
    *(ROOT / "deploy").rglob("*.json"),
    *(ROOT / "deploy" / "runbooks").glob("*.md"),
    *(ROOT / "qualification" / "canary").glob("*.py"),
    ROOT / "README.md",
]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_metrics_page", ROOT / "docs" / "metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented() -> set[str]:
    return set(re.findall(r"^\| `(hallmark_\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))


def named_in(text: str) -> set[str]:
    """Metrics named in a text, without the suffixes of a histogram's samples; recorded series hold a colon."""
    found = re.findall(r"(?<![\w:./-])hallmark_\w+(?![\w:])", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_the_page_is_what_the_code_says(generator: ModuleType) -> None:
    assert generator.page() == PAGE.read_text(), "run .venv/bin/python docs/tables.py"


def test_the_page_has_every_metric_of_the_code(generator: ModuleType) -> None:
    assert {family.name for family in generator.families()} == documented()


def test_whoever_asks_for_a_metric_finds_it_on_the_page() -> None:
    unknown = {str(file.relative_to(ROOT)): named_in(file.read_text()) - documented() for file in ASKING}
    assert len(unknown) > 40
    assert {file: names for file, names in unknown.items() if names} == {}


def test_a_metric_that_does_not_exist_would_be_noticed() -> None:
    assert named_in("rate(hallmark_fallbacks_total[5m]) / hallmark_prefill_seconds_count") - documented() == {
        "hallmark_fallbacks_total"
    }
