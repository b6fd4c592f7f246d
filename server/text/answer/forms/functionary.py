"""functionary v3.2: messages with a recipient in their first line, `>>>` before each but the first.

    all
    Hello.>>>NAME
    {...}

The prompt ends with `>>>`. Arguments are given while they are written.
"""

from collections.abc import Callable, Iterable

from server.text.answer.deltas import Delta, new_call_id
from server.text.answer.forms.json_arguments import JsonArguments
from server.text.answer.parser import Tools

NEXT = ">>>"
_ALL = "all"


class Functionary(JsonArguments):
    """A first line that names neither a tool nor all is content."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._is_later = False  # another message stands before
        self._name = ""  # of the call

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        """Read a recipient."""
        recipients = (_ALL, *self._tools)
        line, line_end, behind = self._text.partition("\n")
        name = line.strip()
        if line_end and name in recipients:
            self._text = behind
            self._name = name
            self._step = self._in_content if name == _ALL else self._before_arguments
        elif line_end or is_last or not any(it.startswith(name) for it in recipients):
            if self._is_later:
                yield from self._content(NEXT)
            self._step = self._in_content

    def _in_content(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(NEXT, is_last=is_last)
        yield from self._content(text)
        if mark is not None:
            self._is_later = True
            self._step = self._begin

    def _before_arguments(self, is_last: bool) -> Iterable[Delta]:
        begun = self._text.lstrip()
        if begun.startswith("{"):
            self._text = begun
            yield self._start(self._name)
            self._open_arguments()
        elif begun or is_last:
            self.is_malformed = True
            self.cut_name = self._name if is_last else None
            yield from self._content(f"{NEXT if self._is_later else ''}{self._name}\n")
            self._step = self._in_content

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between a call's arguments and the next message."""
        self._is_later = True
        _, mark = self._cut(NEXT, is_last=is_last)
        if mark is not None:
            self._step = self._begin
        return ()
