"""Write the tables and lists of README.md that the code knows better. A test compares them.

.venv/bin/python docs/tables.py
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kernels.buckets import Bucket
from server.model.families.registry import FAMILIES
from server.settings import DEMO_MODEL, PREFIX, Settings, flag_of
from server.telemetry.metrics import Metrics, Registry

README = Path(__file__).resolve().parent.parent / "README.md"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def settings_table() -> str:
    """Flag, variable, default and meaning of every field of Settings, in its order."""
    rows = []
    for field in msgspec.json.schema(Settings)["$defs"]["Settings"]["properties"].items():
        name, schema = field
        default = _default_text(getattr(Settings(), name))
        rows.append((f"`{flag_of(name)}`", f"`{PREFIX}{name.upper()}`", default, schema["description"]))
    return table(("flag", "variable", "default", "meaning"), rows)


def _default_text(value: Any) -> str:
    if value is None:
        return ""
    if value == str(DEMO_MODEL):
        return "the demo model"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def metrics_table() -> str:
    """Name, labels and meaning of every metric family, in the order of the registry."""
    registry = Registry()
    Metrics("model", registry, version="0")
    rows = []
    for collector, names in registry._collector_to_names.items():
        family = collector.describe()[0]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name in names or family.name in names
        labels = " ".join(f"`{label}`" for label in collector._labelnames)
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return table(("metric", "type", "labels", "meaning"), rows)


def buckets_table() -> str:
    rows = [(f"`{bucket.label}`", f"{bucket.lo + 1} to {bucket.hi or 'any'}") for bucket in Bucket]
    return table(("bucket", "prompt tokens"), rows)


def families_list() -> str:
    return " ".join(f"`{family.model_type}`" for family in FAMILIES)


TABLES = {"settings": settings_table, "metrics": metrics_table, "buckets": buckets_table}
LISTS = {"families": families_list}


def written(text: str) -> str:
    """`text` with every `<!-- table: NAME -->` or `<!-- list: NAME -->` ... `<!-- end -->` filled.

    Raises KeyError for an unknown name.
    """

    def fill(found: re.Match[str]) -> str:
        kind, name = found[1], found[2]
        content = f"\n{TABLES[name]()}\n" if kind == "table" else LISTS[name]()
        return f"<!-- {kind}: {name} -->{content}<!-- end -->"

    return re.sub(r"<!-- (table|list): (\w+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
