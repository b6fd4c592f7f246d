"""Everything that crosses the socket between the API process and the engine process, and nothing else.

Typed msgpack, never pickle. Times are seconds of the monotonic clock, which both processes share.
"""

import struct
from collections.abc import Iterable, Iterator
from enum import Enum
from secrets import token_hex
from typing import Protocol

import msgspec

from kernels.linear.library.fallback_reason import MatmulFallback
from server.protocol.images import PromptImage
from server.settings import Settings


class FinishReason(Enum):
    STOP = "stop"  # an end or stop token (stop strings are the API process's, which cancels)
    COMPLETE = "complete"  # the request's grammar allows nothing more; the last token belongs to the text
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """Grammar that an answer must match from its first token on. Made and checked by server/grammar."""

    kind: GrammarKind
    text: str
    param: str = ""  # the request's field that it was made of, for errors
    tokens: tuple[int, ...] = ()  # special tokens that a text in Lark names token_0, token_1, ...
    before: "Grammar | None" = None  # in Lark, its rule `before` is what stands before all of that


class Pooling(msgspec.Struct, frozen=True):
    """Result of the last token, wanted in place of an answer: its hidden state behind the final norm, or the
    logits of some tokens.
    """

    label_ids: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Valid by construction: the HTTP edge has checked every limit."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None  # log probabilities of the prompt, beside those of so many likeliest tokens
    logprobs: int | None = None  # those of the answer, likewise
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, each once, and what is added to their logits
    allowed_token_ids: tuple[int, ...] = ()  # no other token is chosen; empty: any
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that no answer has
    grammar: Grammar | None = None
    pooling: Pooling | None = None  # with max_tokens of 1; the token is not sent

    @property
    def needs_history(self) -> bool:
        """Return whether a token depends on the ones before it by more than the model."""
        has_penalty = self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)
        return has_penalty or any(len(word) > 1 for word in self.bad_words)

    @property
    def edits_logits(self) -> bool:
        """Return whether the likeliest token may be another one than the model's."""
        return self.needs_history or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


# --- API process to engine process -----------------------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message: the engine starts with these settings, without these (path, shape) pairs."""

    settings: Settings
    quarantined: list[tuple[str, str]]
    quarantined_by_operator: list[tuple[str, str]] = []


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """One more answer to the prompt of a Submit, with the same sampling but for its seed."""

    request_id: str
    seed: int | None


class EmbeddedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt that have embeddings of their own, as those of an image; their ids are placeholders.

    start      place of the first of them in the prompt
    digest     name of the content: spans with the same one have the same rows and offsets
    rows       [num_tokens, hidden] fp32, little endian: what the first layer reads in place of the ids' embeddings
    offsets    [3, num_tokens] int32, little endian: each token's position, counted from that of the span's start, for
               models whose positions have three parts; empty where each token stands one behind the one before
    num_positions  how far behind the start's position the token behind the span stands; None: `num_tokens`
    image      whose rows the engine's own tower computes, when they are needed; `rows` is empty then
    line       of an image in lines: the tokens of each that have rows; the token between two lines is the text's own
    """

    start: int
    num_tokens: int
    digest: bytes
    rows: bytes
    offsets: bytes = b""
    num_positions: int | None = None
    image: PromptImage | None = None
    line: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Return how many of its tokens have embeddings of their own."""
        return self.num_tokens if self.line is None else self.num_tokens - self.num_tokens // (self.line + 1)


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer a prompt, once and once more for each of `forks`; the prompt is computed once.

    The prompt is spans: token ids, and `embedded` ones over the placeholders among them, in order and apart; `images`
    stand over placeholders likewise, and the engine computes their embeddings.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: bytes = b""  # it shares computed pages only with requests of the same one
    traceparent: str | None = None  # W3C: contextvars do not cross processes
    priority: int = 0  # lower ones are computed first
    forks: list[Fork] = []
    embedded: tuple[EmbeddedSpan, ...] = ()
    images: tuple[PromptImage, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free its pages. Unknown ids are ignored: it may have finished on the way."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process; what still runs is cancelled."""


class Attest(msgspec.Struct, frozen=True, tag=True):
    """Profile a forward pass now; the report comes between steps."""


class ChangeQuarantine(msgspec.Struct, frozen=True, tag=True):
    """An operator quarantines (path, shape) pairs, or lifts their quarantine. Answered by QuarantineChanged."""

    request: int  # the answer has the same number
    add: list[tuple[str, str]] = []
    lift: list[tuple[str, str]] = []


ToEngine = Configure | Submit | Cancel | Attest | ChangeQuarantine | Shutdown

# --- engine process to API process -----------------------------------------------------------------------------------


class PlanRow(msgspec.Struct, frozen=True):
    """One decision of the plan, for GET /plan, the start-up table and the pre-created metric labels."""

    shape: str
    phase: str  # of attention, or the name of another operator, whose rows all phases share
    query_bucket: str  # of another operator: of the rows of a call; so is the next one
    context_bucket: str
    head_dim: int | None  # None: no attention
    path: str | None
    status: str
    wanted: str
    fallback_reasons: list[str]
    rejected: dict[str, list[tuple[str, str]]]  # path -> (code, detail); empty list: only less preferred
    matrix_digest: str | None
    evidence: dict[str, float | str | bool] | None  # summary: p50_us, tflops, worst check and its limit, ...
    notes: tuple[str, ...] = ()  # how measured times chose, where that is not what the catalog says
    order: str | None = None  # in which the path sums, under `reproducible`


class EngineProgress(msgspec.Struct, frozen=True, tag=True):
    """A line for the log while the engine starts: loading, qualifying 3/17, compiling."""

    stage: str
    detail: str


class StartBeat(msgspec.Struct, frozen=True, tag=True):
    """Sent while an engine starts, a second apart at least, when one of its processes has got further.

    stage  what that rank does
    count  grows with what it has done
    """

    rank: int
    stage: str
    count: int


class ServedPath(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a kernel path, for receipts."""

    source_digest: str  # of what its sources compute
    order: str | None  # in which it sums; None: its bits may depend on the batch


class LayersStatus(Enum):
    """Result of holding a start's layers to the plain forward pass."""

    PROVEN = "proven"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class LayersReport(msgspec.Struct, frozen=True):
    """Result of the check of the layers at a start."""

    status: LayersStatus
    detail: str  # the first difference beyond its limit, or why nothing was checked; empty where all is proven
    at: float = 0.0  # Unix seconds when they were checked
    num_layers: int = 0
    num_numbers: int = 0  # that were compared
    largest: float | None = None  # the largest difference as a share of its limit
    seconds: float = 0.0  # that the check took
    is_cached: bool = False  # whether an earlier start on this machine has checked the same of everything


_UNCHECKED = LayersReport(LayersStatus.NOT_CHECKED, "this engine has no such check")


class StateSlots(msgspec.Struct, frozen=True):
    """The memory of recurrent states: slots of one size beside the pages, one for each sequence that runs."""

    num_slots: int
    num_for_snapshots: int  # beyond those of max_num_seqs sequences
    slot_bytes: int  # on each rank


class DraftsPlan(msgspec.Struct, frozen=True):
    """Tokens that are drafted for each sequence and step."""

    method: str
    num_tokens: int
    max_seqs: int | None  # decoding sequences, with more of which none are; None: any number


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    pid: int
    model: str
    max_model_len: int
    num_pages: int
    page_size: int
    fingerprint: dict[str, str | int | None]
    matrix_digest: str | None
    matrix_verdict: str
    plan: list[PlanRow]
    attention_layers: int
    num_compiles: int = 0  # kernels compiled, or loaded from Triton's disk cache, before ready
    matmul_fallbacks: dict[MatmulFallback, int] = {}  # products of many rows that this start left to PyTorch, by reason
    longest_silence_s: float = 0.0  # about, between two heartbeats within a step; 0 on a GPU, where steps are short
    has_grammars: bool = True  # whether grammars can bind answers: of most tokenizers they can
    is_bound_by_cache: bool = False  # whether the settings and the model allow more than max_model_len
    paths: dict[str, ServedPath] = {}  # of the catalog, by name
    layers: LayersReport = _UNCHECKED
    has_peer_memory: bool = True  # whether CUDA let the ranks share memory, where their GPUs can address each other
    max_image_tokens: int = 0  # that the images of one prompt may have; 0: this engine takes no images
    states: StateSlots | None = None  # of a model with recurrent layers
    drafts: DraftsPlan | None = None  # None: no tokens are drafted


class EngineRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine will not serve: a shape has no proof under `refuse`, or the model cannot be loaded. It then exits."""

    code: str
    message: str
    plan: list[PlanRow]
    is_final: bool = False  # neither evidence nor an operator can change it: the server ends with exit code 2


class DispatchCount(msgspec.Struct, frozen=True, array_like=True):
    """Count of a decision's launches in one step: of attention once for each phase of the batch, else once."""

    phase: str  # of attention, or the name of another operator, whose rows all phases share
    bucket: str  # of the longest context that the launches of that part of the batch allow for; else of the rows
    path: str
    status: str
    wanted: str
    fallback_reasons: list[str]
    num_sequences: int
    num_tokens: int
    num_launches: int  # calls of the path: one for each layer that it serves


class AttentionSample(msgspec.Struct, frozen=True, array_like=True):
    """Attention of one phase and window of a sampled step; one layer was measured, the numbers are of all like it."""

    phase: str
    bucket: str  # of the longest context
    kernel_s: float  # between two events on the device
    flops: int  # of the batch's own lengths; causal counts half the square
    hbm_bytes: int  # by the IO model of tiled attention


class TowerTime(msgspec.Struct, frozen=True, array_like=True):
    """Images that the tower has computed together, and the time that it took: the device's, or on a CPU the host's."""

    num_images: int
    num_tokens: int
    seconds: float


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Drafted tokens that a step verified, by their place in a draft: all have a first one."""

    drafted: list[int]
    accepted: list[int]  # those that were chosen as they were drafted


class StateCounts(msgspec.Struct, frozen=True, array_like=True):
    """Slots of recurrent states after a step, and what became of the prompts that were admitted in it."""

    num_used: int  # of sequences, or that get a snapshot
    num_snapshots: int
    num_restored: int  # prompts whose pages were found, and a snapshot as far
    num_missed: int  # prompts whose pages were found further than any snapshot: what is between was computed again


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record of one step of the engine, and of its state after it."""

    step: int
    started_at: float
    duration_s: float
    dispatches: list[DispatchCount]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # prompt tokens not yet computed, of waiting and running sequences
    num_pages_used: int
    num_pages: int
    num_preemptions: int  # in this step
    num_nonfinite: int  # sequences ended because their logits held no finite number
    num_compiles: int  # Triton kernels compiled during this step; 0 after ready
    quarantined: list[tuple[str, str]] = []  # (path, shape) pairs that failed to launch in this step
    oom_stage: str | None = None  # prefill or decode, where the device's memory did not suffice for this step
    num_prefix_queried_tokens: int = 0  # of prompts that were admitted in this step, looked up in the prefix cache
    num_prefix_hit_tokens: int = 0  # those of them that it held
    attention_samples: list[AttentionSample] = []  # of earlier steps, read by now
    peak_temporary_bytes: dict[str, int] = {}  # phase -> what a sampled step took beside weights and cache
    matmul_fallbacks: dict[MatmulFallback, int] = {}  # since the step before
    num_page_mismatches: int = 0  # pages of the prefix cache that did not hold what they should, and were dropped
    tower_times: list[TowerTime] = []  # of this step and earlier ones, read by now
    states: StateCounts | None = None  # of a model with recurrent layers
    drafts: DraftCounts | None = None
    num_undrafted_steps: int = 0  # in which too many sequences decoded for any to be drafted for


class PathUse(msgspec.Struct, frozen=True, array_like=True):
    """One distinct decision that served a request, for its trace."""

    phase: str
    path: str
    status: str
    fallback_reasons: list[str]


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Sent with a request's first token."""

    submitted_at: float  # read from the socket
    scheduled_at: float  # it was given pages
    first_token_at: float  # its first token was read back
    num_chunks: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_computed_images: int = 0  # of the prompt's, those that no earlier prompt had brought
    tower_s: float | None = None  # that the tower took for these, and for those computed beside them; None: not known


class TokenScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log probabilities of the tokens from `position` on, each given all before it, before any penalty.

    packed  of each token, little endian: its log probability (fp32), its rank among all tokens there (uint32, 1 is the
            likeliest), the ids of the likeliest tokens (uint32 each) and their log probabilities (fp32 each)

    As bytes a value takes 4 bytes in both processes; as Python's numbers in lists 40 and, of a long prompt, a second of
    the collector of garbage.
    """

    position: int
    num_top: int
    packed: bytes

    @classmethod
    def of(cls, position: int, num_top: int, rows: Iterable[Iterable[float]]) -> "TokenScores":
        """Pack rows of a log probability, a rank, `num_top` ids and as many log probabilities."""
        pack, num_ids = _row_of_scores(num_top).pack, 1 + num_top
        packed = (pack(logprob, *map(int, rest[:num_ids]), *rest[num_ids:]) for logprob, *rest in rows)
        return cls(position, num_top, b"".join(packed))

    def __len__(self) -> int:
        return len(self.packed) // _row_of_scores(self.num_top).size

    @property
    def logprobs(self) -> bytes:
        """Return the tokens' own log probabilities: fp32, little endian."""
        size = _row_of_scores(self.num_top).size
        return b"".join([self.packed[at : at + 4] for at in range(0, len(self.packed), size)])

    def first(self, num_tokens: int) -> "TokenScores":
        """Return those of the first `num_tokens` tokens."""
        packed = self.packed[: num_tokens * _row_of_scores(self.num_top).size]
        return TokenScores(self.position, self.num_top, packed)

    def rows(self) -> Iterator[tuple[float, int, tuple[int, ...], tuple[float, ...]]]:
        """Yield of each token: log probability, rank, the likeliest tokens, their log probabilities."""
        end = 2 + self.num_top
        for row in _row_of_scores(self.num_top).iter_unpack(self.packed):
            yield row[0], row[1], row[2:end], row[end:]


def _row_of_scores(num_top: int) -> struct.Struct:
    return struct.Struct(f"<fI{num_top}I{num_top}f")  # 0.3 us


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request. After a finish_reason nothing more comes for it."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error_code: str | None = None  # with FinishReason.ERROR: a code of server/errors.py
    error_message: str | None = None
    times: RequestTimes | None = None
    path_uses: list[PathUse] | None = None  # all distinct ones so far; when one is new, and with a finish_reason
    pooled: bytes | None = None  # fp32, little endian: what its Pooling asks for
    scores: tuple[TokenScores, ...] = ()  # where asked for, in order: of these tokens; before the first, of its prompt


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    record: StepRecord
    deltas: list[TokenDelta]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every 0.5 s by the thread that steps, also when idle: proof of progress, not of life."""

    step: int
    sent_at: float
    num_running: int
    num_waiting: int


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that a device error ends: the paths of that step are not to be trusted."""

    message: str
    suspects: list[tuple[str, str]]  # (path, shape)


class ExplainedTime(msgspec.Struct, frozen=True):
    """Time of a forward pass on its device, by what is known of the kernels."""

    share: float  # 0 to 1: in kernels of valid evidence and in small ones that are named
    seconds: dict[str, float]  # by TimeClass
    unproven: dict[str, float]  # seconds by kernel, the longest first
    unexplained: dict[str, float]


class AttestedBatch(msgspec.Struct, frozen=True):
    """One profiled forward pass of a batch that belongs to no request."""

    phase: str
    paths: list[str]
    is_replay: bool  # of a CUDA graph
    kernels: dict[str, int]  # attention's, by how often they ran
    result: str  # match, mismatch or error
    detail: str | None  # what was wrong
    explained: ExplainedTime | None = None  # None where its kernels could not be timed


class AttestationReport(msgspec.Struct, frozen=True, tag=True):
    """Verdict of an attestation: the kernels that the profiler saw beside those that the evidence promises."""

    trigger: str  # start, request or timer
    result: str  # the worst of the batches'
    at: float  # Unix seconds
    busy_s: float  # that the engine did not step
    batches: list[AttestedBatch]
    quarantined: list[tuple[str, str]]  # (path, shape) pairs that serve no more
    id: str = msgspec.field(default_factory=lambda: token_hex(6))  # answers name their latest attestation by it


class ShadowReport(msgspec.Struct, frozen=True, tag=True):
    """Something that a client's step computed, computed again in fp64 and compared."""

    result: str  # match, mismatch or skipped
    at: float  # Unix seconds
    phase: str  # of attention, or the name of another operator
    path: str
    layer: int | None  # None: the head of the model
    head: int | None  # of the largest error; None where nothing was compared, and for products
    position: int | None  # of its query in the sequence; of a product, of its row in the step
    num_rows: int  # rows that were compared
    factor: float | None  # the largest error as a share of its limit
    detail: str | None  # what is wrong, or why the check was skipped
    spent_s: float  # on checks since the report before
    quarantined: list[tuple[str, str]]  # (path, shape) pairs that serve no more
    weight: str | None = None  # of a product with a weight: its name in the layer
    rank: int = 0  # that has computed it


class ReplayReport(msgspec.Struct, frozen=True, tag=True):
    """An answer that was served, computed again alone and compared."""

    result: str  # match, mismatch (bits differ), beyond_limits, skipped or preempted
    at: float  # Unix seconds
    route: str  # by which it was served: a Route of served_answer.py
    cause: str | None  # where the first difference is: logits, sampling or cache; None where there is none
    place: int | None  # of the first token of the answer that differs, from 0
    num_tokens: int  # of the answer, that were compared
    factor: (
        float | None
    )  # the largest distance of log probabilities as a share of its limit; None where bits must match
    detail: str | None  # what is wrong, or why nothing was compared
    spent_s: float
    traceparent: str | None = None  # of the request
    request_id: str | None = None


class QuarantineChanged(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ChangeQuarantine, between two steps."""

    request: int
    stranded: list[str]  # shapes that no other path may serve: because of them nothing was changed
    quarantined: list[tuple[str, str]]  # all (path, shape) pairs that operators have quarantined now


class PlanChanged(msgspec.Struct, frozen=True, tag=True):
    """The plan after a change of the quarantine, by an operator or by the engine."""

    plan: list[PlanRow]


FromEngine = (
    EngineProgress
    | StartBeat
    | EngineReady
    | EngineRefused
    | EngineFailed
    | StepOutput
    | Heartbeat
    | AttestationReport
    | ShadowReport
    | ReplayReport
    | PlanChanged
    | QuarantineChanged
)


class EngineListener(Protocol):
    """Receives everything that the engine reports, on the event loop: no method may block."""

    def on_progress(self, progress: EngineProgress) -> None: ...
    def on_waiting(self) -> None: ...  # once a second from a start to its end
    def on_ready(self, ready: EngineReady) -> None: ...
    def on_refused(self, refused: EngineRefused) -> None: ...
    def on_plan(self, plan: list[PlanRow]) -> None: ...
    def on_step(self, record: StepRecord) -> None: ...
    def on_heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def on_attestation(self, report: AttestationReport) -> None: ...
    def on_shadow(self, report: ShadowReport) -> None: ...
    def on_replay(self, report: ReplayReport) -> None: ...
    def on_death(self, cause: str) -> None: ...
