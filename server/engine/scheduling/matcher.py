"""The interface between scheduling and grammars: an answer's matcher is moved on by each of its tokens."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from server.protocol.messages import Grammar


class Matcher(Protocol):
    """The place in its grammar that one answer has reached; see server/engine/execution/grammars.py."""

    @property
    def is_complete(self) -> bool:
        """Return whether the grammar allows nothing more."""

    def accept(self, token_id: int) -> None:
        """Move on by a token. Raises InvalidGrammar where the grammar does not allow it, or became too costly."""

    def copy(self) -> "Matcher":
        """Return one at the same place, for another answer."""


CompileGrammar = Callable[[Grammar], Future[Matcher]]  # off the stepping thread; the future may raise InvalidGrammar
