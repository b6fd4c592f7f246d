"""Conversations that the APIs allow and a model's template refuses are served; others stay as they are."""

from pathlib import Path
from typing import Any

import pytest

from support.api.edge_fakes import END, saying, served, write_tokenizer

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
NO_SYSTEM = SYSTEM_FIRST.replace(" and not loop.first", "")
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
LENIENT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CALL = turn("assistant", [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}])
RESULT = turn(
    "user", [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}, {"type": "text", "text": "So?"}]
)
HI, YES, GO = turn("user", "Hi"), turn("assistant", "Yes"), turn("user", "Go")
CALLED = '[user]Hi[assistant]<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>[user]'


@pytest.mark.parametrize(
    ("template", "path", "fields", "prompt"),
    [
        (SYSTEM_FIRST, MESSAGES, {"messages": [HI, YES, turn("system", "B"), GO]},
            "[system]B[user]Hi[assistant]Yes[user]Go"),
        (SYSTEM_FIRST, MESSAGES, {"system": "A", "messages": [turn("system", "B"), HI]}, "[system]A\n\nB[user]Hi"),
        (SYSTEM_FIRST, RESPONSES, {"instructions": "A", "input": [turn("developer", "B"), HI]},
            "[system]A\n\nB[user]Hi"),
        (SYSTEM_FIRST, CHAT, {"messages": [turn("system", "A"), turn("developer", "B"), HI]},
            "[system]A\n\nB[user]Hi"),
        (NO_SYSTEM, CHAT, {"messages": [turn("system", "A"), HI, YES, turn("system", "B"), GO]},
            "[user]A\n\nB\n\nHi[assistant]Yes[user]Go"),
        (ALTERNATING, CHAT, {"messages": [HI, GO]}, "[user]Hi\nGo"),
        (ALTERNATING, MESSAGES, {"messages": [HI, CALL, RESULT]},
            f"{CALLED}<tool_response>\nRain\n</tool_response>\nSo?"),
        (LENIENT, CHAT, {"messages": [HI, turn("system", "A"), GO, GO]}, "[user]Hi[system]A[user]Go[user]Go"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_put_as_it_takes_it(
    tmp_path: Path, template: str, path: str, fields: dict[str, Any], prompt: str
) -> None:
    it = served(tmp_path, saying("Ok"), template=template)
    answer = it.post(path, {"model": "tiny", "max_tokens": 16, **fields} if path != RESPONSES else fields)
    assert answer.status_code == 200, answer.text
    assert bytes(i for i in it.engine.submitted[-1][1] if i < END).decode() == f"{prompt}[assistant]"


def test_system_items_beside_a_stored_response_are_served(tmp_path: Path) -> None:
    it = served(tmp_path, saying("Ok"), template=SYSTEM_FIRST)
    first = it.post(RESPONSES, {"instructions": "A", "input": "Hi", "store": True})
    assert first.status_code == 200, first.text
    fields = {"instructions": "B", "previous_response_id": first.json()["id"], "input": [turn("system", "C"), GO]}
    answer = it.post(RESPONSES, fields)
    assert answer.status_code == 200, answer.text
    prompt = bytes(i for i in it.engine.submitted[-1][1] if i < END).decode()
    assert prompt == "[system]B\n\nC[user]Hi[assistant]Ok[user]Go[assistant]"


def test_what_no_form_helps_is_refused_in_the_templates_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ raise_exception('Only ' ~ messages | length ~ ' here') }}")
    answer = served(tmp_path, saying("Ok")).post(CHAT, {"messages": [HI, turn("system", "A"), GO, GO]})
    assert answer.status_code == 400
    assert "Only 4 here" in answer.text
