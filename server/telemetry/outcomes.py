"""The closed sets that are label values at the edge."""

from enum import Enum


class Outcome(Enum):
    OK = "ok"
    CLIENT_ERROR = "client_error"
    REJECTED = "rejected"  # 429 and 503: come again later
    SERVER_ERROR = "server_error"
    DISCONNECTED = "disconnected"


class RejectedFor(Enum):
    NOT_READY = "not_ready"
    DRAINING = "draining"
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_BYTES = "queue_bytes"  # of bodies that arrive or wait to be parsed
    KEY_REQUESTS = "key_requests"  # a minute of one API key
    KEY_TOKENS = "key_tokens"


class DisconnectStage(Enum):
    QUEUED = "queued"  # before the first token
    STREAMING = "streaming"
    SLOW_READER = "slow_reader"  # we hung up: the client did not read


class Sli(Enum):
    """Promise whose keeping is measured."""

    TTFT = "ttft"
    TPOT = "tpot"
    AVAILABILITY = "availability"


class Attestation(Enum):
    """Verdict of a profiled forward pass on the kernels that the evidence promises."""

    MATCH = "match"
    MISMATCH = "mismatch"
    ERROR = "error"  # it could not be profiled: nothing is known


class Shadow(Enum):
    """Verdict of a shadow check on what was served."""

    MATCH = "match"
    MISMATCH = "mismatch"
    SKIPPED = "skipped"  # its inputs were not finite, or there was no memory: nothing is known


class SlotContent(Enum):
    """Content of a slot of recurrent states."""

    SEQUENCE = "sequence"  # the state of one that runs, or a snapshot that is being made
    SNAPSHOT = "snapshot"
    FREE = "free"


class Restore(Enum):
    """Verdict on a prompt whose pages were found, of a model with recurrent layers."""

    HIT = "hit"  # a snapshot of the state was found as far
    MISS = "miss"  # none, or one further back: what is between was computed again


class DraftPlace(Enum):
    """Place of a drafted token in its draft."""

    FIRST = "1"
    SECOND = "2"
    THIRD = "3"
    FOURTH = "4"


class OomStage(Enum):
    """Work that ran when the device's memory did not suffice."""

    PREFILL = "prefill"  # a step with prompts in it
    DECODE = "decode"
