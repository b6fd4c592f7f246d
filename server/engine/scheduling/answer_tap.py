"""The interface to what takes answers of the engine, to compute them again."""

from typing import Protocol

from server.engine.scheduling.sequence import Sequence


class AnswerTap(Protocol):
    """Chooses answers when they are queued, and gets them when they end."""

    def begin(self, seq: Sequence) -> None:
        """Give a sequence that is queued a record, if its answer is wanted."""

    def end(self, seq: Sequence, *, is_sound: bool) -> None:
        """Take a sequence with a record, before its pages are released; unless `is_sound` its answer is no answer."""
