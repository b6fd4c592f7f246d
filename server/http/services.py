"""The objects of the API process that handlers need, in one value; nothing in it is made for a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.edge.admission import Admission
from server.edge.lifecycle import Lifecycle
from server.errors import RETRY_AFTER_S, ModelNotFound, NotReady, ShuttingDown, UnsupportedField
from server.grammar.checker import GrammarChecker
from server.http.images.reader import ImageReader
from server.model.images.settings import ImageSettings
from server.model.load.pooling import PoolingModel
from server.protocol.messages import EngineReady, Grammar
from server.receipt.receipts import Receipts
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


@dataclass(frozen=True, slots=True)
class ServedImages:
    """Images as the model sees them."""

    settings: ImageSettings
    limit: int  # images that a prompt may have


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the API process has it: from texts to tokens and back."""

    names: tuple[str, ...]  # that requests may call it by; the first is its name in answers
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and cannot chat
    syntax: AnswerSyntax  # in which it calls tools and reasons
    sampling_defaults: SamplingDefaults
    special_tokens_in_text: bool = False  # whether a text of a request may spell them
    pooling: PoolingModel | None = None  # None: the model generates
    digests: Mapping[str, str | None] = field(default_factory=dict)  # of its files
    images: ServedImages | None = None  # None: it sees none
    no_images: str | None = None  # why a model that could see images is served without them

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def task(self) -> Task:
        """Task that the model is served for."""
        return Task.GENERATE if self.pooling is None else self.pooling.task

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is one of the model's names, or absent."""
        if name is not None and name not in self.names:
            *others, last = map(repr, self.names)
            known = f"{', '.join(others)} and {last} do" if others else f"{last} does"
            raise ModelNotFound(f"The model {name[:128]!a} does not exist here, {known}.", param="model")


@dataclass(frozen=True, slots=True)
class Telemetry:
    metrics: Metrics
    tracing: Tracing


@dataclass(frozen=True, slots=True)
class Program:
    """The running server program."""

    version: str
    started_at: int  # Unix seconds


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    program: Program
    model: ServedModel
    engine: EngineClient
    telemetry: Telemetry
    lifecycle: Lifecycle
    admission: Admission
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    receipts: Receipts | None = None  # None: answers get none
    images: ImageReader | None = None  # None: the model sees no images

    @property
    def system_fingerprint(self) -> str | None:
        """OpenAI's name of what computes answers; its end is the fingerprint of the metric build_info."""
        ready = self.engine.ready
        return None if ready is None else f"hallmark-{self.program.version}-{fingerprint_digest(ready.fingerprint)}"

    async def check_grammar(self, ready: EngineReady, grammar: Grammar) -> None:
        """Raises UnsupportedField where the model's tokenizer takes no grammar, InvalidGrammar for this grammar."""
        if not ready.has_grammars:
            message = f"{grammar.param}: this model's tokenizer cannot be bound by a grammar."
            raise UnsupportedField(message, param=grammar.param)
        await self.grammars.check(grammar)

    def require_ready(self) -> EngineReady:
        """Raises NotReady or ShuttingDown, and counts why."""
        traffic = self.telemetry.metrics.traffic
        try:
            self.lifecycle.check_open()
        except ShuttingDown:
            traffic.rejected(RejectedFor.DRAINING)
            raise
        ready = self.engine.ready
        if self.engine.state is not EngineState.READY or ready is None:
            traffic.rejected(RejectedFor.NOT_READY)
            raise NotReady(self.why_not_ready(), retry_after_s=RETRY_AFTER_S)
        return ready

    def why_not_ready(self) -> str:
        refused = self.engine.refused
        if self.engine.state is EngineState.REFUSED and refused is not None:
            return f"The engine refuses to serve: {refused.message}"
        return f"The engine is {self.engine.state.value}."
