"""Write the tables and lists of the pages that the code knows better, and docs/metrics.md. Tests compare them.

.venv/bin/python docs/tables.py
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kernels.vocabulary.buckets import Bucket
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.registry import FAMILIES
from server.cli.peer_flags import OTHER_NAMES, WITHOUT_FLAG
from server.http.anthropic.requests import CountTokensRequest, MessagesRequest
from server.http.chat.requests import ChatRequest, CompletionRequest
from server.http.common.validation import NO_EFFECT, RequestModel, refusal_of
from server.http.pooling.requests import EmbeddingRequest, RerankRequest, ScoreRequest
from server.http.responses.requests import ResponsesRequest
from server.settings import DEMO_MODEL, PREFIX, Settings, flag_of

DOCS = Path(__file__).resolve().parent


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


def peer_flags_table() -> str:
    """Flags of other servers, and what stands for them here; those that mean the same in one row."""
    names: dict[str, list[str]] = {}
    for theirs, ours in OTHER_NAMES.items():
        names.setdefault(f"`{ours}`", []).append(f"`{theirs}`")
    for theirs, reason in WITHOUT_FLAG.items():
        names.setdefault(f"none: {reason}", []).append(f"`{theirs}`")
    return table(("there", "here"), [(" ".join(theirs), ours) for ours, theirs in names.items()])


def buckets_table() -> str:
    rows = [(f"`{bucket.label}`", f"{bucket.lo + 1} to {bucket.hi or 'any'}") for bucket in Bucket]
    return table(("bucket", "prompt tokens"), rows)


def fields_table(**models: type[RequestModel]) -> str:
    """Table of every field of these requests and its treatment under each route; empty where it is unknown."""
    verdicts: dict[tuple[str, str], dict[str, str]] = {}  # by field and note: a field may differ between routes
    refused: dict[tuple[str, str], dict[str, str]] = {}
    for route, model in models.items():
        for name, field in model.model_fields.items():
            note = (field.description or "").removeprefix(f"{NO_EFFECT}: ")
            note = note[:1].upper() + note[1:] if not note.startswith("`") else note
            verdict = "honoured" if model.has_effect(name) else "no effect"
            verdicts.setdefault((name, note), {})[route] = verdict
        for name in model.unsupported.keys() - model.model_fields.keys():
            refused.setdefault((name, refusal_of(model, name)), {})[route] = "refused"
    verdicts |= dict(sorted(refused.items()))
    cells = [(f"`{name}`", *(by.get(route, "") for route in models), note) for (name, note), by in verdicts.items()]
    return table(("field", *models, "meaning, or the refusal"), cells)


def families_list() -> str:
    return " ".join(f"`{family.model_type}`" for family in FAMILIES)


def image_models_list() -> str:
    return " ".join(f"`{model.model_type}`" for model in IMAGE_MODELS)


TABLES = {
    "settings": settings_table,
    "peer_flags": peer_flags_table,
    "buckets": buckets_table,
    "generation": lambda: fields_table(completions=CompletionRequest, chat=ChatRequest),
    "responses": lambda: fields_table(responses=ResponsesRequest),
    "messages": lambda: fields_table(messages=MessagesRequest, count_tokens=CountTokensRequest),
    "pooling": lambda: fields_table(embeddings=EmbeddingRequest, score=ScoreRequest, rerank=RerankRequest),
}
LISTS = {"families": families_list, "image_models": image_models_list}
PAGES = (DOCS / "serve-your-model.md", DOCS / "operate.md", DOCS / "api.md")


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
    import metrics_page  # the script beside this one

    for path in PAGES:
        path.write_text(written(path.read_text()))
    metrics_page.PAGE.write_text(metrics_page.page())
