"""Write the tables and lists of the pages that follow from the code, docs/metrics.md, and the README's speed.

Tests compare them.

.venv/bin/python docs/tables.py
"""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kernels.catalog import ALL_PATHS
from kernels.vocabulary.buckets import Bucket
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.registry import FAMILIES
from qualification.model.families.towers import TOWERS
from server.cli import models
from server.cli.peer_flags import OTHER_NAMES, WITHOUT_FLAG
from server.cli.published import PUBLISHED
from server.http.anthropic.requests import CountTokensRequest, MessagesRequest
from server.http.chat.requests import ChatRequest
from server.http.common.validation import NO_EFFECT, RequestModel
from server.http.openai.requests import CompletionRequest
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


def fields_table(like: type[RequestModel] | None = None, **models: type[RequestModel]) -> str:
    """Three tables of every field of these requests: honoured, taken without effect, and refused.

    like  a request whose table is on the page already: fields that mean the same there share one row
    """
    honoured: dict[tuple[str, str], list[str]] = {}  # routes by field and meaning: a field may differ between routes
    no_effect: dict[tuple[str, str], list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for route, model in models.items():
        for name in model.model_fields:
            kind = honoured if model.has_effect(name) else no_effect
            shared = like is not None and model.has_effect(name) and _meaning(like, name) == _meaning(model, name)
            meaning = "As [in chats](#fields)." if shared else _meaning(model, name)
            kind.setdefault((name, meaning), []).append(route)
        for name in sorted(model.unsupported.keys() - model.model_fields.keys()):
            value = " or ".join(f"`{json.dumps(value)}`" for value in model.unsupported[name])
            refused.setdefault((name, value), []).append(route)
    kinds = (("field", "meaning", honoured), ("without effect", "why", no_effect), ("refused", "unless it is", refused))
    return "\n\n".join(_folded(head, note, rows, tuple(models)) for head, note, rows in kinds)


def _meaning(model: type[RequestModel], name: str) -> str | None:
    """Return the description of a field; None where the model has no such field."""
    if name not in model.model_fields:
        return None
    note = (model.model_fields[name].description or "").removeprefix(f"{NO_EFFECT}: ")
    return note[:1].upper() + note[1:] if not note.startswith("`") else note


def _folded(head: str, note: str, rows: dict[tuple[str, str], list[str]], routes: tuple[str, ...]) -> str:
    """Table in which fields of the same meaning and routes share a row; no route means all."""
    names: dict[tuple[str, str], list[str]] = {}
    for (name, meaning), of in rows.items():
        only = "" if len(of) == len(routes) else ", ".join(of)
        names.setdefault((only, meaning), []).append(f"`{name}`")
    if len(routes) == 1:
        return table((head, note), [(" ".join(fields), meaning) for (_, meaning), fields in names.items()])
    cells = [(" ".join(fields), only, meaning) for (only, meaning), fields in names.items()]
    return table((head, "only of", note), cells)


def families_list() -> str:
    return " ".join(f"`{family.model_type}`" for family in FAMILIES)


def image_models_list() -> str:
    return " ".join(f"`{it}`" for it in dict.fromkeys(model.model_type for model in IMAGE_MODELS))


def towers_list() -> str:
    return " ".join(f"`{model_type}`" for model_type in TOWERS)


def mixtures_list() -> str:
    """The families whose layers may have experts."""
    found = (it.model_type for it in FAMILIES if it.tensors is not None and it.tensors.experts is not None)
    return " ".join(f"`{model_type}`" for model_type in found)


def models_table() -> str:
    """The table of `hallmark models`, its times with links to their samples."""
    known = models.gpus()
    rows = []
    for model in PUBLISHED:
        *cells, _ = models.row_of(model, known, ALL_PATHS)
        times = (f"[{it.gpu}](benchmarks/{it.file}) {it.first_token_ms:g}, {it.token_ms:g} ms" for it in model.measured)
        rows.append((model.name, f"`{model.architecture}`", *cells[2:], "; ".join(times)))
    return table(models.head_of(known), rows)


TABLES = {
    "models": models_table,
    "settings": settings_table,
    "peer_flags": peer_flags_table,
    "buckets": buckets_table,
    "generation": lambda: fields_table(completions=CompletionRequest, chat=ChatRequest),
    "responses": lambda: fields_table(ChatRequest, responses=ResponsesRequest),
    "messages": lambda: fields_table(ChatRequest, messages=MessagesRequest, count_tokens=CountTokensRequest),
    "pooling": lambda: fields_table(ChatRequest, embeddings=EmbeddingRequest, score=ScoreRequest, rerank=RerankRequest),
}
LISTS = {
    "families": families_list,
    "image_models": image_models_list,
    "mixtures": mixtures_list,
    "towers": towers_list,
}
PAGES = (DOCS / "models.md", DOCS / "serve-your-model.md", DOCS / "operate.md", DOCS / "api.md")


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
    import beside_vllm  # the scripts beside this one
    import metrics_page

    for path in PAGES:
        path.write_text(written(path.read_text()))
    metrics_page.PAGE.write_text(metrics_page.page())
    beside_vllm.write()
