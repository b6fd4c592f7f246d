"""Text to token ids and back, whole or piece by piece. The work is the `tokenizers` library's."""

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from pathlib import Path

import tokenizers

from server.model.load.tokenizer_files import load_tokenizer
from server.text.special_tokens import MARK, SpecialTokens
from server.text.token_names import TokenNames

REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8, or not yet, decode to
_MAX_WINDOW = 64  # tokens that may end in such bytes before they are taken for good: text has a boundary every 4 bytes
_DECODED_ALONE = 1024  # tokens; less than 1 ms
_REMEMBERED = 8192  # texts, mostly of one token


class Tokenizer:
    """The tokenizer.json of a model folder. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text_of: Callable[[tuple[int, ...]], str] = lru_cache(_REMEMBERED)(lambda ids: self.decode([*ids]))
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json and the tokens of the files beside it. Raises ModelError."""
        tokenizer = load_tokenizer(folder)
        tokenizer.no_truncation()  # a prompt is never cut in silence
        tokenizer.no_padding()
        return cls(tokenizer)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Return the guard against special tokens in messages. Raises ModelError where that cannot be."""
        return SpecialTokens(self._tokenizer)

    @cached_property
    def names(self) -> TokenNames:
        """Return the names of single tokens."""
        anchor = self.encode("a", add_special_tokens=False)
        return TokenNames(self.decode, self._tokenizer.id_to_token, self.special_ids, anchor)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model wants around a prompt if asked for.

        A special token's text becomes that token, unless `special_tokens` has marked it.
        """
        if MARK in text:
            assert not add_special_tokens, "only a rendered chat is marked"
            return self.special_tokens.encode(text)
        # A batch of one: for a single text the library keeps the interpreter's lock, and 1 MB held up every other
        # request for 1.2 s of a core. Fast: without offsets, which takes half the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`; special tokens and ids outside the vocabulary have none."""
        if len(token_ids) > _DECODED_ALONE:
            [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)  # lets others run meanwhile
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


class Detokenizer:
    """Text of a growing sequence of tokens, in pieces that join to `decode` of the whole.

    A piece never ends inside a UTF-8 character. Only a window of tokens is decoded again:

        prefix (emitted; decoders look back at what stands before, for a space) | pending (not emitted)

    Bytes that are no UTF-8 come out as replacement characters; how many is the decoder's choice, and a decoder that
    judges a run of byte tokens as a whole may choose another number for the whole than for its pieces.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Iterable[str] = ()) -> None:
        """`visible`: special tokens that are text here."""
        self._tokenizer = tokenizer
        ids = ((tokenizer.added_ids.get(text), text) for text in visible)
        self._visible = {token_id: text for token_id, text in ids if token_id in tokenizer.special_ids}
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            # It has no text, and would leave the window without a character to look back at.
            return self.finish() + self._visible[token_id] if token_id in self._visible else ""
        self._pending.append(token_id)
        text = self._pending_text()
        # An unfinished character shows as one replacement character for all its bytes, or as one for each.
        if text.endswith(REPLACEMENT) and len(self._pending) <= _MAX_WINDOW:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the rest: bytes that were to become a character and never did."""
        return self._take(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        return self._tokenizer.decode([*self._prefix, *self._pending])[len(self._prefix_text) :]

    def _take(self, text: str) -> str:
        """Emit the pending text, and let its tokens be the new prefix if they have any."""
        if text:
            self._prefix = self._pending
            self._prefix_text = self._tokenizer.text_of(tuple(self._prefix))
            self._pending = []
        return text
