"""A completion's text goes on from its prompt's, as decoding both together does; a chat's turn begins a text."""

import json
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from server.protocol.messages import FinishReason, TokenDelta
from support.api.edge_fakes import Served, events, playing, served

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "▁▁▁", "▁return", "▁Paris", "▁is", "👩", "👧", "\u200d"]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m.content + '<|end|>' if m.role == 'user' else m.content }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "Where"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is"}]


def write_llama2_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Words with their leading spaces; the decoder takes the first space of a text away."""
    pieces = [("<unk>", 0.0), *((word, -1.0) for word in WORDS)]
    pieces += [(char, -10.0) for char in ("▁", *sorted({*string.printable} - {" "}))]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = pre_tokenizers.Split("▁▁▁", "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(SPECIAL)
    start = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return inner


class Llama2:
    """A server with such a tokenizer, whose model writes the tokens of a text."""

    def __init__(self, folder: Path, *written: str) -> None:
        self.inner = write_llama2_tokenizer(folder)
        self.ids = [self.inner.token_to_id(word) for word in written]
        end = self.inner.token_to_id("</s>")
        deltas = [*(TokenDelta("", [it], None) for it in self.ids), TokenDelta("", [end], FinishReason.STOP)]
        self.served: Served = served(folder, playing(*deltas))

    def choice(self, **fields: Any) -> dict[str, Any]:
        """The choice of a completion, the same when it is streamed."""
        [whole] = self.served.post(COMPLETIONS, fields).json()["choices"]
        chunks: list[Any] = events(self.served.post(COMPLETIONS, fields | {"stream": True}))[:-1]
        streamed = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in streamed) == whole["text"]
        for name in ("tokens", "text_offset") if whole["logprobs"] else ():
            given = [value for choice in streamed if choice["logprobs"] for value in choice["logprobs"][name]]
            assert given == whole["logprobs"][name]
        return dict(whole)


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ("Once upon a", ["▁time", "▁there"]),
        ("def f():\n", ["▁▁▁", "▁return"]),
        ("Once</s>", ["▁upon"]),
        ("x 👩", ["\u200d", "👧", "▁a"]),
    ],
)
def test_prompt_and_completion_are_the_decoded_whole(tmp_path: Path, prompt: str, written: list[str]) -> None:
    it = Llama2(tmp_path, *written)
    ids = it.inner.encode(prompt).ids
    begun, whole = (it.inner.decode(some) for some in (ids, ids + it.ids))
    text = "".join(written).replace("▁", " ")
    assert whole[len(begun) :] == text
    for sent in (prompt, ids):
        assert it.choice(prompt=sent)["text"] == text
    echoed = it.choice(prompt=prompt, echo=True, logprobs=0)
    assert echoed["text"] == prompt + text
    assert it.choice(prompt=ids, echo=True)["text"] == whole
    raw = it.inner.decode(ids + it.ids, skip_special_tokens=False)
    assert it.choice(prompt=ids, echo=True, skip_special_tokens=False)["text"] == raw


def test_a_stop_string_may_begin_with_a_space(tmp_path: Path) -> None:
    assert Llama2(tmp_path, "▁time", "▁there").choice(prompt="Once upon a", stop=[" time"])["text"] == ""


@pytest.mark.parametrize("skips", [True, False])
def test_an_echo_is_the_prompt_that_was_sent(tmp_path: Path, skips: bool) -> None:
    it, prompt = Llama2(tmp_path, "▁is"), "<|user|>Hi<|end|>"
    fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "skip_special_tokens": skips}
    assert it.choice(prompt=prompt, **fields)["text"] == prompt
    ids = it.inner.encode(prompt).ids
    assert it.choice(prompt=ids, **fields)["text"] == it.inner.decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("names_ids", [True, False])
@pytest.mark.parametrize("prompt", ["Once upon a", "a 👩\u200d👧 b", "<|user|>Hi<|end|>", "a  b"])
def test_text_offsets_are_places_in_the_text(tmp_path: Path, prompt: str, has_ids: bool, names_ids: bool) -> None:
    it = Llama2(tmp_path, "▁time", "👩", "▁there")
    sent = it.inner.encode(prompt).ids if has_ids else prompt
    fields: dict[str, Any] = {"logprobs": 0, "return_tokens_as_token_ids": names_ids, "skip_special_tokens": False}
    choice = it.choice(prompt=sent, echo=True, **fields)
    tokens = [it.inner.id_to_token(token_id) for token_id in (*it.inner.encode(prompt).ids, *it.ids)]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert len(choice["logprobs"]["tokens"]) == len(offsets) == len(tokens) + 1
    spelled = [text[start:end] for start, end in pairwise(offsets)]
    expected = [token.replace("▁", " ") for token in tokens]
    if has_ids:
        assert spelled == expected
    else:  # what the tokenizer has added is no part of the text
        assert "".join(spelled) == text
        assert all(it in (full, full.removeprefix(" ")) for it, full in zip(spelled[1:], expected[1:], strict=True))
        assert spelled[0] == ""
    alone = it.choice(prompt=sent, **fields)["logprobs"]["text_offset"]
    assert alone == [0, len(" time"), len(" time👩"), len(" time👩 there")]


def test_a_prefilled_turn_goes_on_with_a_space(tmp_path: Path) -> None:
    it = Llama2(tmp_path, "▁Paris").served
    chat = it.post(CHAT, {"messages": BEGUN, "continue_final_message": True, "logprobs": True}).json()["choices"][0]
    assert (chat["message"]["content"], chat["logprobs"]["content"][0]["token"]) == (" Paris", " Paris")
    message = it.post(MESSAGES, {"model": "tiny", "max_tokens": 9, "messages": BEGUN}).json()
    assert message["content"][0]["text"] == " Paris"


def test_a_new_turn_begins_without_a_space(tmp_path: Path) -> None:
    it = Llama2(tmp_path, "▁Paris", "▁is").served
    assert it.post(CHAT, {"messages": ASKED}).json()["choices"][0]["message"]["content"] == "Paris is"
    message = it.post(MESSAGES, {"model": "tiny", "max_tokens": 9, "messages": ASKED}).json()
    assert message["content"][0]["text"] == "Paris is"
