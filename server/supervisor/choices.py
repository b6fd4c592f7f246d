"""Several answers to one prompt: submitted at once, so that the engine computes the prompt once."""

import msgspec

from server.protocol.messages import Fork, Submit


class Choices:
    """The answers to one prompt, whose sampling differs by the seed alone. Each joins when it has a reader."""

    def __init__(self, num_choices: int) -> None:
        self._num_missing = num_choices
        self._first: Submit | None = None
        self._forks: list[Fork] = []

    def join(self, submit: Submit) -> Submit | None:
        """Add an answer. Return the message that asks for all of them when the last has joined."""
        if self._first is None:
            self._first = submit
        else:
            self._forks.append(Fork(submit.request_id, submit.sampling.seed))
        self._num_missing -= 1
        if self._num_missing:
            return None
        first, self._first = self._first, None  # it may have images
        return msgspec.structs.replace(first, forks=self._forks)
