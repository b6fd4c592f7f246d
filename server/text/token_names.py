"""Names of single tokens beside their log probabilities: a text, and the bytes that it stands for."""

import re
from collections.abc import Callable, Collection
from functools import lru_cache

_REPLACEMENT = "\ufffd"
_REMEMBERED = 8192  # tokens
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (Radford et al. 2019, GPT-2's encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TokenNames:
    """Names of a tokenizer's tokens, each made once. Safe to use from several threads."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        piece_of: Callable[[int], str | None],
        special_ids: Collection[int],
        anchor: list[int],
    ) -> None:
        """piece_of  a token as the vocabulary writes it
        anchor    tokens of a plain text: behind them no decoder takes a token's leading space away"""
        self._decode = decode
        self._piece_of = piece_of
        self._special_ids = special_ids
        self._anchor = anchor
        self._anchor_text = decode(anchor)
        self.text_of: Callable[[int], str] = lru_cache(_REMEMBERED)(self._text_of)
        self.bytes_of: Callable[[int], list[int]] = lru_cache(_REMEMBERED)(self._bytes_of)

    def _text_of(self, token_id: int) -> str:
        """The text of a token; bytes that are no character by themselves come out as replacement characters."""
        if token_id in self._special_ids:
            return self._piece_of(token_id) or ""
        text = self._decode([*self._anchor, token_id])
        if not self._anchor_text or not text.startswith(self._anchor_text):
            return self._decode([token_id])
        return text[len(self._anchor_text) :]

    def _bytes_of(self, token_id: int) -> list[int]:
        text = self.text_of(token_id)
        if _REPLACEMENT not in text:
            return list(text.encode())
        piece = self._piece_of(token_id) or text
        found = _BYTE_PIECE.fullmatch(piece)
        if found:
            return [int(found[1], 16)]
        if all(char in _BYTE_OF for char in piece):
            return [_BYTE_OF[char] for char in piece]
        return list(text.encode())
