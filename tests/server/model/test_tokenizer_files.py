"""Files beside tokenizer.json: the tokens that they add, name and end answers with, as transformers reads them."""

import json
import logging
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from server.errors import ModelError
from server.model.load.digests import model_digests
from server.model.load.tokenizer_files import end_token_ids, read_tokenizer_files, tokenizer_json
from server.text.tokenizer import Tokenizer

WORDS = {word: i for i, word in enumerate(["[UNK]", "a", "b", "c", "</s>", "<in_vocab>"])}
OWN = [{"id": 6, "content": "<own>", "special": False}, {"id": 7, "content": "<|end|>", "special": True}]
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
NEW = ["<new>", "<tool>", "<pad>"]
TEXTS = ["a b c", "a<own>b<|end|>c", "a <new> <tool>b<pad> c", "</s>a<in_vocab> </s>", "<new><new>b  <own> c", ""]
NAMES = ["bos_token", "eos_token", "pad_token", "image_token"]


def write(folder: Path, files: Mapping[str, object], own: list[dict[str, Any]] = OWN) -> Path:
    tokenizer = LibraryTokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    content = json.loads(tokenizer.to_str()) | {"added_tokens": [FLAGS | token for token in own]}
    for name, value in {"tokenizer.json": content, **files}.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def some_files(rng: random.Random) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """Files of all ages: named tokens anywhere, as texts or objects; added tokens in either file or in none."""
    own = [token | {"special": rng.random() < 0.5, "lstrip": rng.random() < 0.3} for token in OWN]

    def named() -> dict[str, object]:
        found: dict[str, object] = {}
        for name in rng.sample(NAMES, rng.randrange(4)):
            text = rng.choice(["<own>", "<|end|>", "</s>", "<in_vocab>", *NEW])
            found[name] = text if rng.random() < 0.6 else {"__type": "AddedToken", "content": text, **FLAGS}
        return {name: text if name in NAMES[:3] or isinstance(text, str) else "<new>" for name, text in found.items()}

    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **named()}
    extra = rng.choice([None, ["<tool>"], ["<own>", "<pad>"], {"audio_token": "<tool>"}])
    if extra is not None:
        config[
            "extra_special_tokens" if rng.random() < 0.5 or isinstance(extra, dict) else "additional_special_tokens"
        ] = extra
    files: dict[str, object] = {"tokenizer_config.json": config}
    added = {text: 8 + i for i, text in enumerate(NEW[: rng.randrange(4)])}
    kind = rng.randrange(3)
    if kind == 0:
        tokens = [*own, *({"id": i, "content": text} for text, i in added.items())]
        config["added_tokens_decoder"] = {
            str(token["id"]): FLAGS | {"special": rng.random() < 0.5} | {k: v for k, v in token.items() if k != "id"}
            for token in tokens
        }
    elif kind == 1:
        files["added_tokens.json"] = added
    if rng.random() < 0.5:
        files["special_tokens_map.json"] = {
            name: {k: v for k, v in value.items() if k not in ("__type", "special")}
            if isinstance(value, dict)
            else value
            for name, value in named().items()
        }
    return files, own


@pytest.mark.parametrize("seed", range(120))
def test_files_of_all_ages_mean_what_transformers_reads(seed: int, tmp_path: Path) -> None:
    files, own = some_files(random.Random(seed))
    folder = write(tmp_path, files, own)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.load(folder)
    assert read_tokenizer_files(folder).named == theirs.special_tokens_map
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for_grammars = LibraryTokenizer.from_str(tokenizer_json(folder))
    assert for_grammars.get_added_tokens_decoder().keys() == theirs.added_tokens_decoder.keys()


DECODER = {"8": FLAGS | {"content": "<tool>", "special": True}}


def test_an_end_token_marked_ordinary_has_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, {"tokenizer_config.json": {"eos_token": "<own>"}}))
    assert tokenizer.decode(tokenizer.encode("a<own>")) == "a"


@pytest.mark.parametrize(
    ("files", "left_out", "why"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"9": DECODER["8"]}}}, "<tool>", "says 9.* would get 8"),
        ({"added_tokens.json": {"<tool>": 11}}, "<tool>", "says 11.* would get 8"),
        (
            {"tokenizer_config.json": {"pad_token": "<pad>"}, "config.json": {"vocab_size": 8}},
            "<pad>",
            "vocab_size is 8",
        ),
        (
            {"added_tokens.json": {"<tool>": 8}, "config.json": {"text_config": {"vocab_size": 8}}},
            "<tool>",
            "would get 8, and the model's vocab_size is 8",
        ),
    ],
)
def test_a_token_without_an_id_is_left_out_and_named(
    files: dict[str, object], left_out: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.load(write(tmp_path, files))
    assert tokenizer.vocab_size == 8
    [record] = caplog.records
    message = record.getMessage()
    assert left_out in message
    assert re.search(why, message)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, [7]),
        ({"special_tokens_map.json": {"eos_token": {"content": "<own>"}}}, [6]),
        ({"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": DECODER}}, [4]),
        ({"tokenizer_config.json": {"eos_token": "<tool>", "added_tokens_decoder": DECODER}}, [8]),
        (
            {"tokenizer_config.json": {"eos_token": "<|end|>"}, "special_tokens_map.json": {"eos_token": "<own>"}},
            [7, 6],
        ),
        ({"tokenizer_config.json": {"eos_token": None}}, []),
        ({}, []),
    ],
)
def test_end_tokens_of_every_file_have_their_ids(files: dict[str, object], expected: list[int], tmp_path: Path) -> None:
    assert end_token_ids(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("special_tokens_map.json", "3", "must hold a JSON object"),
        ("added_tokens.json", '{"<a>": "x"}', r"Expected `int`, got `str` - at `\$\[...\]`"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"8": "<a>"}}', "added_tokens_decoder: Expected `object`"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {"content": "<a>"}}}',
            "added_tokens_decoder: Expected",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(name: str, content: str, why: str, tmp_path: Path) -> None:
    (write(tmp_path, {}) / name).write_text(content)
    with pytest.raises(ModelError, match=why) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_the_digest_covers_tokens_of_the_other_files(tmp_path: Path) -> None:
    def digest() -> str | None:
        return model_digests(tmp_path, has_weights=False)["tokenizer"]

    write(tmp_path, {"tokenizer_config.json": {"eos_token": "<|end|>"}})
    alone = digest()
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "<|end|>", "model_max_length": 5}})
    assert digest() == alone is not None
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "<own>"}})
    assert digest() != alone
