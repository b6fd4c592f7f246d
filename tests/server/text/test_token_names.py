"""Names of single tokens: texts that join to the whole, and the bytes of those that are no character alone."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from server.text.tokenizer import Tokenizer


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
