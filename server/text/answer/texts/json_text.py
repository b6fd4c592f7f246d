"""The end of a JSON object in a text that comes in pieces."""

import re

_OUTSIDE = re.compile(r"""["'{}\[\]]""")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class JsonText:
    """Finds the end of one object or array. What is read need not be JSON: only strings and brackets are looked at.

    Strings may have Python's quotes, too.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._quote = ""  # of the string that is read
        self._is_escaped = False
        self._depth = 0

    @property
    def is_in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str) -> str:
        """Read on, and return what stands behind the end; the first text begins with the opening bracket."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING[self._quote] if self._quote else _OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            if self._take(found[0]):
                return text[at:]
        return ""

    def _take(self, char: str) -> bool:
        """Read a character that matters, and return whether it is the last."""
        if char == "\\":
            self._is_escaped = True
        elif char in ("'", '"'):
            self._quote = "" if self._quote else char
        else:
            self._depth += 1 if char in "{[" else -1
            self.is_whole = self._depth <= 0
        return self.is_whole
