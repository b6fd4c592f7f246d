"""Grammars over printable characters, which are a tiny model's tokens."""

import llguidance

from server.engine.execution.grammars import Grammars
from support.models.tiny_llama import NAN_TOKEN

EOS = 95


class AsciiTokens:
    """Printable characters, a token each, as far as the model's vocabulary goes."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([32 + index]) for index in range(EOS)), b"<end>", b"<nan>")
    special_token_ids = (EOS, NAN_TOKEN)

    def __call__(self, text: bytes) -> list[int]:
        return [value - 32 for value in text]


def ascii_grammars() -> Grammars:
    return Grammars(llguidance.LLTokenizer(llguidance.TokenizerWrapper(AsciiTokens())), (EOS,))
