"""Text to token ids and back, whole or piece by piece. The work is the `tokenizers` library's."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import tokenizers

from server.model.load.tokenizer_files import load_tokenizer
from server.text.chat_template import ChatTemplate
from server.text.request_text import RequestText
from server.text.special_tokens import SpecialTokens
from server.text.token_names import TokenNames

REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8, or not yet, decode to
_MAX_WINDOW = 64  # tokens that may end in such bytes before they are taken for good: text has a boundary every 4 bytes
_LOOKED_BACK = 64  # tokens of a prompt's end, among which one is looked for that has a text
_MAX_CHARACTER = 8  # tokens: a character has at most 4 bytes, and spaces before it may have no text at a text's start
_DECODED_ALONE = 1024  # tokens; less than 1 ms
_REMEMBERED = 8192  # texts, mostly of one token


class Tokenizer:
    """The tokenizer.json of a model folder. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        """`template`: of the model's chats; what it writes no text of a request can spell."""
        self._tokenizer = tokenizer
        self._template = template
        self.text_of: Callable[[tuple[int, ...]], str] = lru_cache(_REMEMBERED)(lambda ids: self.decode([*ids]))
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path, template: ChatTemplate | None = None) -> "Tokenizer":
        """Read `folder`/tokenizer.json and the tokens of the files beside it. Raises ModelError."""
        tokenizer = load_tokenizer(folder)
        tokenizer.no_truncation()  # a prompt is never cut in silence
        tokenizer.no_padding()
        return cls(tokenizer, template)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Return the guard against control tokens in messages. Raises ModelError where that cannot be."""
        written = frozenset[str]() if self._template is None else self._template.control_tokens(self.added_ids)
        return SpecialTokens(self._tokenizer, written)

    @cached_property
    def names(self) -> TokenNames:
        """Return the names of single tokens."""
        anchor = self.encode("a", add_special_tokens=False)
        return TokenNames(self.decode, self._tokenizer.id_to_token, self.special_ids, anchor)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model wants around a prompt if asked for.

        A special token's text becomes that token, but for one with a character that a request wrote (RequestText).
        """
        if isinstance(text, RequestText):
            if text.spans:
                return self.special_tokens.encode(text, add_special_tokens=add_special_tokens)
            text = str.__str__(text)
        # A batch of one: for a single text the library keeps the interpreter's lock, and 1 MB held up every other
        # request for 1.2 s of a core. Fast: without offsets, which takes half the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def starts(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The place in `text` where each token begins that `encode` makes of it; those around a prompt have no text."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        found, end_before = [], 0
        for start, end in encoding.offsets:
            found.append(min(start, end_before))  # some tokenizers leave the space before a word to no token
            end_before = max(end, end_before)
        return found

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; special tokens have none unless asked for, ids outside the vocabulary never."""
        if len(token_ids) > _DECODED_ALONE:  # lets others run meanwhile
            [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        """Return the number of last tokens that are bytes of a character without its end."""
        tail = b""
        for num, token_id in enumerate(reversed(token_ids[-3:]), start=1):
            tail = bytes(self.names.bytes_of(token_id)) + tail
            _, num_whole = codecs.utf_8_decode(tail, "replace", False)
            if num_whole < len(tail):
                return num
        return 0


class Detokenizer:
    """Text of a growing sequence of tokens, in pieces that join to `decode` of the whole.

    A piece never ends inside a UTF-8 character. Only a window of tokens is decoded again:

        prefix (emitted; decoders look back at what stands before, for a space) | pending (not emitted)

    The text may go on from a prompt's, as `decode` of prompt and answer does: decoders that take the first space of a
    text away leave the answer's alone. Of the prompt only its last character is decoded.

    Bytes that are no UTF-8 come out as replacement characters; how many is the decoder's choice, and a decoder that
    judges a run of byte tokens as a whole may choose another number for the whole than for its pieces.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Iterable[str] = (), *, prompt: Sequence[int] = ()) -> None:
        """visible  special tokens that are text here
        prompt   tokens that the text goes on from; bytes at its end that begin a character are part of what follows"""
        self._tokenizer = tokenizer
        ids = ((tokenizer.added_ids.get(text), text) for text in visible)
        self._visible = {token_id: text for token_id, text in ids if token_id in tokenizer.special_ids}
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._pending: list[int] = []
        if prompt:
            self._look_back(prompt)

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        if not self._has_text(token_id):
            # It would leave the window without a character to look back at.
            if token_id not in self._visible:
                return ""
            text = self.finish() + self._visible[token_id]
            if not self._prefix:
                self._pending = []  # spaces that begin a text
                self._stand_behind_text()
            return text
        self._pending.append(token_id)
        text = self._pending_text()
        # An unfinished character shows as one replacement character for all its bytes, or as one for each.
        if text.endswith(REPLACEMENT) and len(self._pending) <= _MAX_WINDOW:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the rest: bytes that were to become a character and never did."""
        return self._take(self._pending_text()) if self._pending else ""

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._tokenizer.special_ids and token_id < self._tokenizer.vocab_size

    def _look_back(self, prompt: Sequence[int]) -> None:
        """Let the prompt's last character be the prefix, and the beginning of one behind it be pending."""
        tail = prompt[-_LOOKED_BACK:]
        ids = [*islice(filter(self._has_text, reversed(tail)), _MAX_CHARACTER + 3)][::-1]
        if ids and REPLACEMENT in self._tokenizer.text_of((ids[-1],)):
            num = self._tokenizer.num_unfinished(ids)
            ids, self._pending = ids[: len(ids) - num], ids[len(ids) - num :]
        for num in range(1, min(len(ids), _MAX_CHARACTER) + 1):
            text = self._tokenizer.text_of(tuple(ids[-num:]))
            if text and not text.startswith(REPLACEMENT):
                self._prefix, self._prefix_text = ids[-num:], text
                return
        if ids:  # bytes that are no text, or spaces alone
            self._prefix, self._prefix_text = ids, self._tokenizer.decode(ids)
        elif not self._visible.keys().isdisjoint(tail):
            self._stand_behind_text()

    def _stand_behind_text(self) -> None:
        """Let a letter be the prefix: what stands there is text, and no token whose text could be decoded."""
        self._prefix = self._tokenizer.encode("a", add_special_tokens=False)
        self._prefix_text = self._tokenizer.decode(self._prefix)

    def _pending_text(self) -> str:
        return self._tokenizer.decode([*self._prefix, *self._pending])[len(self._prefix_text) :]

    def _take(self, text: str) -> str:
        """Emit the pending text, and let its tokens be the new prefix if they have any."""
        if text:
            self._prefix = self._pending
            self._prefix_text = self._tokenizer.text_of(tuple(self._prefix))
            self._pending = []
        return text
