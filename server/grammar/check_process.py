"""The process that checks grammars for the API: `python -m server.grammar.check_process`, see checker.py.

What a stranger's schema makes it take ends with it: its memory is limited, and whoever waits too long kills it.
"""

import resource
import struct
import sys
from typing import BinaryIO

import msgspec

from server.errors import InvalidGrammar
from server.grammar.compiled import ByteTokens, byte_tokenizer, compiled
from server.protocol.messages import Grammar

LENGTH = struct.Struct("<I")  # before each message; an answer is an error's text, or empty
_MAX_MEMORY_BYTES = 2 << 30  # of addresses; 1 GiB of them is the interpreter's and its libraries'


def read_message(stream: BinaryIO) -> bytes | None:
    """Return the next message, None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def write_message(stream: BinaryIO, message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    tokens = byte_tokenizer()
    write_message(answers, b"")  # ready
    while (message := read_message(requests)) is not None:
        try:
            compiled(tokens, msgspec.msgpack.decode(message, type=Grammar), ByteTokens.others)
        except InvalidGrammar as error:
            write_message(answers, error.message.encode())
        else:
            write_message(answers, b"")


if __name__ == "__main__":
    main()
