"""Admission of requests to the queue, and the objects that every handler needs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from server.edge.lifecycle import Lifecycle
from server.errors import RETRY_AFTER_S, ModelNotFound, NotReady, ShuttingDown, TooManyRequests, UnsupportedField
from server.grammar.checker import GrammarChecker
from server.model.load.pooling import PoolingModel
from server.protocol.messages import EngineReady, Grammar
from server.settings import Settings, Task
from server.supervisor.client import EngineClient, EngineState
from server.telemetry.metrics import Metrics
from server.telemetry.operators import fingerprint_digest
from server.telemetry.outcomes import RejectedFor
from server.telemetry.tracing import Tracing
from server.text.answer.syntax import AnswerSyntax
from server.text.chat_template import ChatTemplate
from server.text.sampling_defaults import SamplingDefaults
from server.text.tokenizer import Tokenizer


class Admission:
    """Counts, exactly, what waits for a first token; refuses what would exceed the limits."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.wait_s = 0.0  # moving mean of the time until each prompt of a request has its first token

    def enter(self) -> "Place":
        """A place in the queue. Raises TooManyRequests when it is full."""
        if self.num_requests >= self.max_requests:
            message = f"{self.num_requests} requests wait for their first token, the limit is {self.max_requests}."
            raise TooManyRequests(message, retry_after_s=self.retry_after_s)
        self.num_requests += 1
        return Place(self)

    @property
    def retry_after_s(self) -> int:
        return min(60, max(1, math.ceil(self.wait_s)))


class Place:
    """One request's place in the queue; `leave` may be called more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._has_left = False

    def add_tokens(self, num_tokens: int) -> None:
        """The prompt's size is known. Raises TooManyRequests when it does not fit; an empty queue takes any."""
        admission = self._admission
        total = admission.num_tokens + num_tokens
        if admission.num_tokens and total > admission.max_tokens:
            message = f"{total} prompt tokens would wait for a first token, the limit is {admission.max_tokens}."
            raise TooManyRequests(message, retry_after_s=admission.retry_after_s)
        admission.num_tokens = total
        self._num_tokens += num_tokens

    async def left(self) -> None:
        """Wake the requests that wait when a request ends."""
        self.leave()

    def leave(self, waited_s: float | None = None) -> None:
        """Leave the queue: each prompt has its first token, after `waited_s`, or the request has ended without it."""
        if self._has_left:
            return
        self._has_left = True
        self._admission.num_requests -= 1
        self._admission.num_tokens -= self._num_tokens
        if waited_s is not None:
            self._admission.wait_s += 0.2 * (waited_s - self._admission.wait_s)


@dataclass(frozen=True, slots=True)
class Edge:
    settings: Settings
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and cannot chat
    metrics: Metrics
    tracing: Tracing
    lifecycle: Lifecycle
    admission: Admission
    version: str
    started_at: int  # Unix seconds
    sampling_defaults: SamplingDefaults
    syntax: AnswerSyntax = field(default_factory=AnswerSyntax)  # in which the model calls tools and reasons
    pooling: PoolingModel | None = None  # None: the model generates
    model_digests: Mapping[str, str | None] = field(default_factory=dict)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)

    @property
    def model(self) -> str:
        return self.metrics.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may call the model by."""
        return self.settings.model_names

    @property
    def task(self) -> Task:
        """Task that the model is served for."""
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @property
    def system_fingerprint(self) -> str | None:
        """OpenAI's name of what computes answers; its end is the fingerprint of the metric build_info."""
        ready = self.engine.ready
        return None if ready is None else f"hallmark-{self.version}-{fingerprint_digest(ready.fingerprint)}"

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is one of the model's names, or absent."""
        if name is not None and name not in self.model_names:
            *others, last = map(repr, self.model_names)
            known = f"{', '.join(others)} and {last} do" if others else f"{last} does"
            raise ModelNotFound(f"The model {name[:128]!a} does not exist here, {known}.", param="model")

    async def check_grammar(self, ready: EngineReady, grammar: Grammar) -> None:
        """Raises UnsupportedField where the model's tokenizer takes no grammar, InvalidGrammar for this grammar."""
        if not ready.has_grammars:
            message = f"{grammar.param}: this model's tokenizer cannot be bound by a grammar."
            raise UnsupportedField(message, param=grammar.param)
        await self.grammars.check(grammar)

    def require_ready(self) -> EngineReady:
        """Raises NotReady or ShuttingDown, and counts why."""
        try:
            self.lifecycle.check_open()
        except ShuttingDown:
            self.metrics.traffic.rejected(RejectedFor.DRAINING)
            raise
        ready = self.engine.ready
        if self.engine.state is not EngineState.READY or ready is None:
            self.metrics.traffic.rejected(RejectedFor.NOT_READY)
            raise NotReady(self.why_not_ready(), retry_after_s=RETRY_AFTER_S)
        return ready

    def why_not_ready(self) -> str:
        refused = self.engine.refused
        if self.engine.state is EngineState.REFUSED and refused is not None:
            return f"The engine refuses to serve: {refused.message}"
        return f"The engine is {self.engine.state.value}."
