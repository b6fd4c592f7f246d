"""The comparison of tokenizers with transformers: what counts as equal, as a documented difference, and as neither."""

import json
from pathlib import Path

import pytest
from compare_tokenizers import CLASS_IGNORES_FILE, NUM_TEXTS, RUN_OF_BYTES, Row, Shipped, compare, texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.mark.parametrize(
    ("what", "theirs", "by_file", "difference"),
    [
        ("encoded", [2], [1], CLASS_IGNORES_FILE),
        ("encoded", [2], [2], None),
        ("random ids streamed", "a\ufffd\ufffd", "a\ufffd\ufffd", RUN_OF_BYTES),
        ("random ids streamed", "ab", "ab", None),
        ("text streamed", "a\ufffd\ufffd", "a\ufffd\ufffd", None),
    ],
)
def test_what_has_no_name_is_an_other(what: str, theirs: object, by_file: object, difference: str | None) -> None:
    row = Row("a", "b", "1", "BPE", "X", 5)
    row.compare(what, "text", [1], theirs, lambda: by_file)
    assert row.differences == ({} if difference is None else {difference: 1})
    assert len(row.others) == (difference is None)
    row.compare(what, "text", [1], [1], lambda: by_file)
    assert row.equal == {what: 1}


def test_texts_are_three_hundred_and_the_same_each_time() -> None:
    found = [*texts()]
    assert len(found) == NUM_TEXTS
    assert found == [*texts()]


def test_a_tokenizer_of_bytes_differs_nowhere(tmp_path: Path) -> None:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    row = compare(Shipped("bytes", "here", "1", tmp_path))
    assert (row.others, row.differences) == ([], {})
    assert row.equal["encoded"] == 2 * NUM_TEXTS
    assert row.equal["text continued"] > 100
