"""The fields that decide where a prompt begins and ends, and what an answer's text holds."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from server.protocol.messages import FinishReason, TokenDelta
from support.api.edge_fakes import (
    END,
    MAX_MODEL_LEN,
    Served,
    delta,
    events,
    playing,
    saying,
    served,
    write_tokenizer,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SPECIAL = 257
SAID = {"role": "assistant", "content": "Well, "}


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("special")
    write_tokenizer(path, special=["<|x|>"])
    return path


def text_of(it: Served, **fields: Any) -> str:
    """The text of a completion, which its stream has too."""
    body = {"prompt": "a", "max_tokens": 64, **fields}
    whole: str = it.post(COMPLETIONS, body).json()["choices"][0]["text"]
    chunks: list[Any] = events(it.post(COMPLETIONS, body | {"stream": True}))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    return whole


def prompt_of(it: Served, path: str, **fields: Any) -> str:
    answer = it.post(path, fields)
    assert answer.status_code == 200, answer.text
    return bytes(it.engine.submitted[-1][1]).decode()


@pytest.mark.parametrize(("is_included", "text"), [(False, "Hel"), (True, "Hello w")])
def test_the_stop_string_is_text_where_asked_for(folder: Path, is_included: bool, text: str) -> None:
    it = served(folder, saying("Hel", "lo w", "orld"))
    assert text_of(it, stop=["lo w"], include_stop_str_in_output=is_included) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Hello"),
        ({"skip_special_tokens": False}, "Hel<|x|>lo"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "Hel<|x|>lo<|end|>"),
        ({"include_stop_str_in_output": True}, "Hello"),
    ],
)
def test_special_tokens_are_text_where_asked_for(special: Path, fields: dict[str, Any], text: str) -> None:
    script = playing(
        delta("Hel", is_first=True), TokenDelta("", [SPECIAL]), delta("lo"), TokenDelta("", [END], FinishReason.STOP)
    )
    assert text_of(served(special, script), **fields) == text


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({"stop": "<|x|>"}, "Hel", 4),
        ({"stop": ["lo", "<|x|>"], "include_stop_str_in_output": True}, "Hel<|x|>", 4),
        ({"stop": "<|x|>", "skip_special_tokens": False}, "Hel", 4),
        ({"stop": "<|x|>", "min_tokens": 4}, "Hello", 7),
        ({"stop": ["l<|x|>"]}, "Hello", 7),
    ],
    ids=["left out", "in the text", "shown", "before min_tokens", "within a stop string"],
)
def test_a_special_token_that_is_a_stop_string_ends_the_answer(
    special: Path, fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    script = playing(
        delta("Hel", is_first=True), TokenDelta("", [SPECIAL]), delta("lo"), TokenDelta("", [END], FinishReason.STOP)
    )
    it = served(special, script)
    assert text_of(it, **fields) == text
    usage = it.post(COMPLETIONS, {"prompt": "a", "max_tokens": 64, **fields}).json()["usage"]
    assert usage["completion_tokens"] == num_tokens


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"truncate_prompt_tokens": 2}, "cd"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 9}, "abcd"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1021}, "bcd"),
        ({"truncate_prompt_tokens": -1}, "abcd"),
    ],
)
def test_a_prompt_is_cut_where_asked_for(folder: Path, fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(served(folder), COMPLETIONS, prompt="abcd", **fields) == prompt


@pytest.mark.parametrize(("side", "kept"), [("left", "yz"), ("right", "ab")])
def test_a_text_that_no_context_holds_is_cut_too(folder: Path, side: str, kept: str) -> None:
    fields = {"truncate_prompt_tokens": 2, "truncation_side": side}
    assert prompt_of(served(folder), COMPLETIONS, prompt=f"ab{'c' * 300_000}yz", **fields) == kept


@pytest.mark.parametrize(("side", "kept"), [("left", "z[assistant]"), ("right", "[user]<|x|>a")])
def test_a_chat_that_no_context_holds_is_cut_too(special: Path, side: str, kept: str) -> None:
    it = served(special)
    messages = [{"role": "user", "content": f"<|x|>a{'c' * 300_000}<|x|>yz"}]
    assert prompt_of(it, CHAT, messages=messages, truncate_prompt_tokens=12, truncation_side=side) == kept
    error = it.post(CHAT, {"messages": messages}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_prompt_is_cut_to_leave_room_for_the_answer(folder: Path) -> None:
    """A completion has 16 tokens unless told otherwise; a chat has what is left, which would be one."""
    it, messages = served(folder), [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    assert len(prompt_of(it, COMPLETIONS, prompt="x" * MAX_MODEL_LEN, truncate_prompt_tokens=-1)) == MAX_MODEL_LEN - 16
    assert it.engine.submitted[-1][2].max_tokens == 16
    assert len(prompt_of(it, CHAT, messages=messages, truncate_prompt_tokens=-1, max_tokens=9)) == MAX_MODEL_LEN - 9
    assert prompt_of(it, CHAT, messages=USER, truncate_prompt_tokens=-1) == "[user]Hi[assistant]"
    error = it.post(CHAT, {"messages": messages, "truncate_prompt_tokens": -1}).json()["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")
    assert "leaves room for max_tokens, and the request has none; send it" in error["message"]


def test_a_prompt_is_not_cut_to_nothing(folder: Path) -> None:
    error = served(folder).post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}).json()["error"]
    assert error["message"] == "truncate_prompt_tokens must be -1 or at least 1, got 0."


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "[user]Hi[assistant]Well, [assistant]"),
        ({"add_generation_prompt": False}, "[user]Hi[assistant]Well, "),
        ({"continue_final_message": True}, "[user]Hi[assistant]Well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[user]Hi[assistant]Well, "),
    ],
)
def test_a_prompt_ends_as_asked_for(folder: Path, fields: dict[str, Any], prompt: str) -> None:
    messages = [*USER, SAID]
    it = served(folder)
    assert prompt_of(it, CHAT, messages=messages, **fields) == prompt
    assert bytes(it.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]).decode() == prompt


@pytest.mark.parametrize("is_added", [None, True, False])
def test_messages_have_the_tokens_of_their_chat(tmp_path: Path, is_added: bool | None) -> None:
    write_tokenizer(tmp_path, special=["<|x|>"])
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|x|> $A", special_tokens=[("<|x|>", SPECIAL)])
    tokenizer.save(str(path))
    it, body = served(tmp_path), {"messages": USER, "add_special_tokens": is_added}
    assert it.post(CHAT, body).status_code == 200
    prompt = it.engine.submitted[-1][1]
    assert it.post("/tokenize", body).json()["tokens"] == prompt
    assert (prompt[0] == SPECIAL) is bool(is_added)
    of_text = it.post("/tokenize", {"prompt": "a", "add_special_tokens": is_added}).json()["tokens"]
    assert (of_text[0] == SPECIAL) is (is_added is not False)


def test_special_tokens_are_text_of_token_ids(special: Path) -> None:
    tokens = [SPECIAL, *b"Hi", END]
    answer = served(special).post("/detokenize", {"tokens": tokens})
    assert answer.json() == {"prompt": "<|x|>Hi<|end|>"}


def test_a_field_of_messages_is_refused_beside_a_prompt(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = served(folder).post("/tokenize", {"prompt": "a", "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        ("{{ m.content }}<end>\n", "[user]Hi<end>\n[assistant]Well, "),
        ("{{ m.content | trim }}.", "[user]Hi.[assistant]Well,"),
    ],
)
def test_a_continued_message_is_cut_behind_its_text(tmp_path: Path, content: str, prompt: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}"
    write_tokenizer(tmp_path, template=template)
    assert prompt_of(served(tmp_path), CHAT, messages=[*USER, SAID], continue_final_message=True) == prompt


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"add_generation_prompt": True}, "cannot both be true"),
        ({"messages": [*USER, SAID | {"tool_calls": [{"function": {"name": "f"}}]}]}, "has tool calls"),
    ],
)
def test_what_cannot_be_continued_is_refused(folder: Path, fields: dict[str, Any], said: str) -> None:
    body = {"messages": [*USER, SAID], "continue_final_message": True, **fields}
    answer = served(folder).post(CHAT, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
    assert said in answer.json()["error"]["message"]


def test_a_template_without_the_last_text_cannot_continue(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ messages[0].content }}")
    answer = served(tmp_path).post(CHAT, {"messages": [*USER, SAID], "continue_final_message": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
