"""Messages between the planner of a load, the processes that send it and the judges of its samples."""

from itertools import pairwise

import msgspec


class LoadRequest(msgspec.Struct, frozen=True):
    """One streamed completion of token ids, greedy and to its full length."""

    at_s: float  # when it is to be sent, from the start of its trace
    token_ids: list[int]
    max_tokens: int
    label: str = ""  # what it is measured under beside its length


class Sample(msgspec.Struct, frozen=True):
    """The result of one request; times are seconds from the start of its trace."""

    num_prompt_tokens: int
    label: str
    planned_at: float
    sent_at: float
    read_at: list[float]  # when each read from the socket came that held new tokens
    num_tokens: int  # as the server counts them, else one an event
    has_usage: bool
    error: str | None = None  # one line

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the bytes of the first token."""
        return self.read_at[0] - self.sent_at if self.read_at and self.error is None else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.error is not None or self.num_tokens < 2 or len(self.read_at) < 2:
            return None
        return (self.read_at[-1] - self.read_at[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two arrivals of text; a server may send several tokens at once."""
        return [b - a for a, b in pairwise(self.read_at)]


class ClientLag(msgspec.Struct, frozen=True):
    """The client's own lateness, in seconds: its part in what it measures."""

    loop_p99_s: float  # of a timer on its event loop
    loop_max_s: float
    send_p99_s: float  # between when a request was due and when it was sent
    send_max_s: float


class LoadResult(msgspec.Struct, frozen=True):
    samples: list[Sample]
    lag: ClientLag

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last token."""
        began = min((sample.sent_at for sample in self.samples), default=0.0)
        return max((sample.read_at[-1] for sample in self.samples if sample.read_at), default=began) - began


class Target(msgspec.Struct, frozen=True):
    """A server: scheme://host:port and a path before /v1, if any."""

    host: str
    port: int
    is_tls: bool
    path: str
    model: str
    bearer: str | None = None
