"""Read the arguments of calls that are JSON objects, and give them while they are written."""

import abc
from collections.abc import Callable, Iterable

from server.text.answer.deltas import Delta, new_call_id
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.json_text import JsonText
from server.text.answer.texts.values import is_json


class JsonArguments(StepParser):
    """A format that reads a call's arguments in a state of its own, behind `_open_arguments`."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._object = JsonText()
        self._given: list[str] = []  # arguments of the call

    def _open_arguments(self) -> None:
        """Begin to read the object that the text begins with."""
        self._object, self._given = JsonText(), []
        self._step = self._in_arguments

    def _in_arguments(self, is_last: bool) -> Iterable[Delta]:
        rest = self._object.feed(self._text)
        given = self._text[: len(self._text) - len(rest)]
        self._text = rest
        if given:
            self._given.append(given)
            yield self._arguments(given)
        if not (self._object.is_whole or is_last):
            return
        if self._object.is_whole and is_json("".join(self._given)):
            yield self._end()
        else:
            self.is_malformed = True
        self._step = self._behind

    @abc.abstractmethod
    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Read on behind a call's arguments."""
