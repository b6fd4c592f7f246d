"""The counts of one request, whatever its protocol calls them."""

from dataclasses import dataclass

from server.telemetry.request import RequestRecord


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int  # each prompt once, however many answers it has
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    reasoning_tokens: int  # of the completion


def usage_of(record: RequestRecord, *, is_empty: bool = False) -> Usage:
    """The counts of a request so far. `is_empty`: no token that is generated is given out."""
    num_tokens = 0 if is_empty else record.num_tokens
    return Usage(record.num_prompt_tokens, num_tokens, record.num_cached_tokens, record.num_reasoning_tokens)
