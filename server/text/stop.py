"""Stop strings, found across the borders of tokens."""


class StopMatcher:
    """Watches a growing text for the first of some strings to be complete; of two at once, the longer.

    Text that may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: tuple[str, ...], *, is_included: bool = False) -> None:
        """`stops` may be empty; none of them may. `is_included`: the one that matches is shown. Raises ValueError."""
        if not all(stops):
            raise ValueError("a stop string needs at least 1 character, got an empty one")
        self._stops = stops
        self._is_included = is_included
        self._held = ""
        self.matched: str | None = None

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> str:
        """The text that may be shown now, up to the stop string; nothing more after a match."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        found = [(buffer.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in buffer]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return buffer[: end if self._is_included else end - len(self.matched)]
        num_held = max((overlap(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop` and is not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
