"""Detokenizing in pieces gives what decoding the whole gives, and never half a character."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from server.errors import ModelError
from server.settings import DEMO_MODEL
from server.text.tokenizer import REPLACEMENT, Detokenizer, Tokenizer

SPECIAL = 256
INNER = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
DEMO = Tokenizer.load(DEMO_MODEL)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens and one special token."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return Tokenizer(inner)


def word_tokenizer() -> Tokenizer:
    """Pieces as sentencepiece has them: a leading space is part of a piece, and not shown where a text begins."""
    words = ["▁the", "▁king", "s", "▁", "king", "!", "the"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    inner.decoder = decoders.Metaspace()
    return Tokenizer(inner)


def fallback_tokenizer() -> Tokenizer:
    """Byte tokens as sentencepiece has them for what it has no piece for: a run of them is UTF-8 as a whole or not."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner)


def spelled_tokenizer(decoder: decoders.Decoder, *words: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.decoder = decoder
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner)


BYTES, FALLBACK = byte_tokenizer(), fallback_tokenizer()
SPACED = ("▁the", "▁", "▁▁", "king", "s", "a▁b", "!")
DECODERS = {
    "Strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, first": decoders.Metaspace(prepend_scheme="first"),
    "Metaspace, never": decoders.Metaspace(prepend_scheme="never"),
}
KINDS = {name: spelled_tokenizer(decoder, *SPACED) for name, decoder in DECODERS.items()} | {
    "WordPiece": spelled_tokenizer(decoders.WordPiece(), "the", "king", "##s", "!", "n't"),
    "BPEDecoder": spelled_tokenizer(decoders.BPEDecoder(), "the</w>", "king", "s</w>", "!</w>"),
}


def in_pieces(
    tokenizer: Tokenizer, token_ids: Iterable[int], prompt: Sequence[int] = (), visible: Sequence[str] = ()
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, visible, prompt=prompt)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


@settings(deadline=None)
@given(st.lists(st.integers(0, SPECIAL), max_size=60))
def test_pieces_of_any_bytes_join_to_the_whole(token_ids: list[int]) -> None:
    assert "".join(in_pieces(BYTES, token_ids)) == BYTES.decode(token_ids)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_piece_cuts_a_character_of_real_text(text: str) -> None:
    token_ids = [token_id for token_id in BYTES.encode(text) if token_id != SPECIAL]  # a text can spell <|end|>
    text = text.replace("<|end|>", "")
    pieces = in_pieces(BYTES, token_ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_an_answer_goes_on_as_the_decoded_whole_does(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=90))
    cut = data.draw(st.integers(0, len(token_ids)))
    prompt, answer = token_ids[:cut], token_ids[cut:]
    assert tokenizer.decode(prompt) + "".join(in_pieces(tokenizer, answer, prompt)) == tokenizer.decode(token_ids)
    if kind in DECODERS:  # others put spaces around special tokens
        begun, whole = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt, token_ids))
        assert begun + "".join(in_pieces(tokenizer, answer, prompt, visible=["<s>"])) == whole


@settings(deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_an_answer_ends_a_character_of_its_prompt(text: str, data: st.DataObject) -> None:
    for tokenizer, token_ids in ((BYTES, BYTES.encode(text)), (FALLBACK, [256, *text.encode(), 256])):
        if SPECIAL in token_ids and tokenizer is BYTES:
            continue
        cut = data.draw(st.integers(0, len(token_ids)))
        num_whole = cut - tokenizer.num_unfinished(token_ids[:cut])
        begun = tokenizer.decode(token_ids[:num_whole])
        assert begun + "".join(in_pieces(tokenizer, token_ids[cut:], token_ids[:cut])) == tokenizer.decode(token_ids)


def test_only_a_prompts_end_is_decoded() -> None:
    tokenizer, lengths = word_tokenizer(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: lengths.append(len(ids)) or decode(ids)  # type: ignore[func-returns-value,method-assign,misc,assignment]
    assert "".join(in_pieces(tokenizer, [1], [0, 1] * 50_000)) == " king"
    assert max(lengths) <= 3


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(["Once", " upon", "  ", "\n", "👩‍👧", "é", " a", "ſ"]), max_size=12))
def test_tokens_begin_where_their_text_does(words: list[str]) -> None:
    text = "".join(words)
    token_ids, starts = DEMO.encode(text, add_special_tokens=False), DEMO.starts(text, add_special_tokens=False)
    assert len(starts) == len(token_ids)
    for place, start in enumerate(starts):
        if REPLACEMENT not in DEMO.decode(token_ids[:place]):
            assert DEMO.decode(token_ids[:place]) == text[:start]


def test_a_character_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token_id) for token_id in BYTES.encode("a😀")] == ["a", "", "", "", "😀"]


def test_two_characters_of_fallback_bytes_come_out_one_by_one() -> None:
    detokenizer = Detokenizer(FALLBACK)
    assert [detokenizer.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_a_special_token_has_no_text() -> None:
    assert in_pieces(BYTES, [SPECIAL, *BYTES.encode("x"), SPECIAL]) == ["", "x", "", ""]


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    assert Detokenizer(BYTES).push(100_000) == ""


def test_endless_broken_bytes_keep_the_window_small() -> None:
    tokenizer, lengths = byte_tokenizer(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: lengths.append(len(ids)) or decode(ids)  # type: ignore[func-returns-value,method-assign]
    detokenizer = Detokenizer(tokenizer)
    first_byte_of_four = BYTES.encode("😀")[0]
    text = ""
    for _ in range(1000):
        text += detokenizer.push(first_byte_of_four)
    assert 60 < max(lengths) <= 2 * 65  # what was taken last, and what is not certain
    assert len(text + detokenizer.finish()) == 1000


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def share_without_others(work: Callable[[], object]) -> float:
    """The longest time for which another thread did not run meanwhile, as a share of all of it; 1: it never did."""
    times = [time.perf_counter()]
    has_ended = threading.Event()

    def tick() -> None:
        while not has_ended.wait(0.001):
            times.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began_at = time.perf_counter()
    work()
    took_s = time.perf_counter() - began_at
    has_ended.set()
    thread.join()
    return max(b - a for a, b in pairwise([*times, time.perf_counter()])) / took_s


def test_a_long_text_leaves_other_threads_running() -> None:
    text = "ab c " * 100_000
    token_ids = DEMO.encode(text)
    # The best of some: on a busy machine the other thread may have to wait for a processor.
    assert min(share_without_others(lambda: DEMO.encode(text)) for _ in range(4)) < 0.7
    assert min(share_without_others(lambda: DEMO.decode(token_ids)) for _ in range(4)) < 0.7
    assert DEMO.decode(token_ids) == text


@given(text=st.text())
def test_tokens_are_the_librarys(text: str) -> None:
    for special in (True, False):
        expected = INNER.encode(text, add_special_tokens=special).ids
        assert DEMO.encode(text, add_special_tokens=special) == expected


def test_bytes_of_a_byte_level_vocabulary_join_to_the_text() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(inner)
    text = "a €\n"
    ids = tokenizer.encode(text)
    assert bytes(byte for token_id in ids for byte in tokenizer.names.bytes_of(token_id)) == text.encode()
    assert [tokenizer.names.text_of(token_id) for token_id in ids] == ["a", " ", *"\ufffd" * 3, "\n"]


def test_a_leading_space_is_kept_and_a_special_token_has_a_name() -> None:
    vocab = {"▁a": 0, "▁the": 1, "re": 2, "<0xE2>": 3, "<0x0A>": 4, "a": 5, "▁": 6}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["</s>"])
    names = Tokenizer(inner).names
    assert [names.text_of(token_id) for token_id in (1, 2, 4, 7)] == [" the", "re", "\n", "</s>"]
    assert [names.bytes_of(token_id) for token_id in (1, 3, 4)] == [[*b" the"], [0xE2], [10]]
