"""What a shadow check found, as it crosses the socket."""

import msgspec


class ShadowReport(msgspec.Struct, frozen=True, tag=True):
    """Some attention of a client's step, computed again in fp64 and compared."""

    result: str  # match, mismatch or skipped
    at: float  # Unix seconds
    phase: str
    path: str
    layer: int
    head: int | None  # of the largest error; None where nothing was compared
    position: int | None  # of its query in the sequence
    num_rows: int  # query rows that were compared
    factor: float | None  # the largest error as a share of its limit
    detail: str | None  # what is wrong, or why the check was skipped
    spent_s: float  # on checks since the report before
    quarantined: list[tuple[str, str]]  # (path, shape) pairs that serve no more
