"""The counts of one request, whatever its protocol calls them."""

from dataclasses import dataclass

from server.telemetry.request import RequestRecord


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    reasoning_tokens: int  # of the completion


def usage_of(record: RequestRecord) -> Usage:
    """The counts of a request of one prompt and one answer, so far."""
    return Usage(record.num_prompt_tokens, record.num_tokens, record.num_cached_tokens, record.num_reasoning_tokens)
