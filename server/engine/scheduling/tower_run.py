"""Images that a tower has computed together, as scheduling knows them."""

from typing import Protocol

from server.protocol.messages import PathUse


class TowerRun(Protocol):
    """Images that a tower has computed together for a step."""

    @property
    def uses(self) -> list[PathUse]:
        """Return the decisions that served them, as a request says of them."""

    @property
    def seconds(self) -> float | None:
        """Return the time that they took; None where it is not known yet."""
