"""An answer as it was served: all that is needed to compute it again, in whichever process."""

from dataclasses import dataclass
from enum import Enum

from server.protocol.messages import SamplingParams


class Route(Enum):
    """Route by which an answer was computed: the first of these that holds."""

    PREEMPTED = "preempted"  # its pages were taken, and computed again
    FORKED = "forked"  # its pages are copies of those of another answer to its prompt
    HIT = "hit"  # its prompt began in pages that another request had computed
    CHUNKED = "chunked"  # its prompt was computed by several steps
    BATCHED = "batched"  # other sequences were in the same steps
    PLAIN = "plain"  # alone, in one piece


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """Prompt, parameters and answer of one sequence.

    seed       by which it was drawn: the client's, or the engine's own
    stop_ids   tokens that end it, which `min_tokens` bans before
    logprobs   fp32, little endian: the log probability of each token of the answer, of the model's own logits; empty
               where they were not recorded
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    logprobs: bytes = b""
