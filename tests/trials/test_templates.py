"""`make test-templates` without its packages: what it finds in them, and what it calls a fault."""

import io
import tarfile
from pathlib import Path

import pytest
from conversations import CONVERSATIONS
from run_templates import NAMES, compare, guarded, sources_of

from server.text.chat_template import ChatTemplate

CHATML = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
STRICT = CHATML.replace(
    "<|{{", "{% if message.role == 'system' and loop.index > 1 %}{{ raise_exception('no') }}{% endif %}<|{{"
)


@pytest.mark.parametrize(
    ("source", "conversation", "outcome"),
    [
        (CHATML, "markup", "tools as text"),
        (CHATML, "turns", "equal"),
        (CHATML, "developer", "normalized"),
        (STRICT, "system later", "rearranged"),
        ("{{ raise_exception('never') }}", "user", "both refuse"),
    ],
)
def test_outcomes_have_their_names(source: str, conversation: str, outcome: str) -> None:
    assert compare(source, ChatTemplate(source, NAMES), *CONVERSATIONS[conversation]) == outcome


def test_a_template_that_renders_otherwise_is_a_fault() -> None:
    assert compare(CHATML, ChatTemplate(f"{CHATML}!", NAMES), *CONVERSATIONS["user"]) == "other"


@pytest.mark.parametrize("special", [False, True])
def test_marks_in_texts_are_tried(special: bool) -> None:
    source = CHATML.replace("<|{{", "{# <|user|> #}<|{{")
    assert guarded(source, ChatTemplate(source, NAMES), *CONVERSATIONS["turns"], special=special) == "guarded"
    if not special:  # this template does not say what the other one writes
        assert (
            guarded(source, ChatTemplate("{{ messages[0].content }}", {}), *CONVERSATIONS["user"], special=False)
            == "other"
        )


def test_templates_are_found_in_files_and_strings(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    contents = {"a/x.jinja": CHATML, "a/y.py": f"T = {STRICT!r}\nOTHER = '{{% if a %}}'", "a/z.txt": CHATML}
    with tarfile.open(archive, "w:gz") as files:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            files.addfile(member, io.BytesIO(content.encode()))
    assert [*sources_of(archive)] == [CHATML, STRICT]
