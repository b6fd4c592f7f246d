"""An engine over a decoder on a CPU, of small sizes, whose graphs are closures, as a session."""

import torch

from server.engine.execution.capture import Capture
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.embeddings import EmbeddingFormat
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.page_seals import PageSeals
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.states import StatePool
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache
from server.model.vision.tower import Tower
from support.engine.ascii_grammars import ascii_grammars
from support.engine.graph_session import Session
from support.engine.late_dispatch import (
    CPU,
    EAGER,
    GRAPHED,
    MAX_LEN,
    MAX_SEQS,
    MAX_STEP,
    PAGE_SIZE,
    SIZES,
    dispatcher_of,
)

NUM_SLOTS = 24  # of states, where the model has recurrent layers


class ServedDecoder(Session):
    """A session, and everything of its engine that a test may want to look at."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        capture: Capture | None = None,
        tokens: SampledTokens | None = None,
        sizes: GraphSizes = SIZES,
        num_pages: int = 64,
        page_size: int = PAGE_SIZE,
        max_seqs: int = MAX_SEQS,
        max_step: int = MAX_STEP,
        max_len: int = MAX_LEN,
        most_drafted: int = 0,
        drafter: Drafter | None = None,
        num_embeddings: int = 0,
        max_written: int | None = None,
        tower: Tower | None = None,
        runs_ahead: bool = True,
        has_grammars: bool = False,
    ) -> None:
        """Without `capture` no step is a graph. `num_embeddings` at a time, `max_written` of them in a step."""
        config = decoder.config
        path = EAGER if capture is None else GRAPHED
        self.dispatcher = dispatcher_of(decoder, path.name, page_size=page_size, most_drafted=most_drafted)
        kv = KVCache.allocate(config, num_pages, page_size, torch.float32, CPU)
        states = StateCache.allocate(config, NUM_SLOTS, torch.float32, CPU)
        self.worker = Worker(
            decoder,
            kv,
            self.dispatcher,
            tokens or SampledTokens(sizes.max_sampled, CPU),
            states=states,
            num_embeddings=num_embeddings,
            tower=tower,
        )
        self.graphs = None if capture is None else StepGraphs(self.worker, sizes, max_context=MAX_LEN)
        if self.graphs is not None and capture is not None:
            self.graphs.capture(capture, lambda _: None)
        grammars = ascii_grammars() if has_grammars else None
        self.runner = ModelRunner(self.worker, self.graphs, grammars=grammars)
        self.pool = PagePool(num_pages, page_size, None if states is None else StatePool(NUM_SLOTS))
        limits = SchedulerLimits(
            max_len,
            max_seqs,
            max_step,
            max_drafted_tokens=most_drafted,
            max_embedded_tokens=num_embeddings,
            max_written_tokens=max_written,
        )
        self.scheduler = Scheduler(limits, self.pool, shares_pages=True, seals=PageSeals(self.pool))
        takes = EmbeddingFormat(
            config.hidden_size, config.has_three_positions, config.tower, sees_both_ways=config.has_image_spans
        )
        options = EngineOptions(config.vocab_size, (), 0, runs_ahead, takes)
        compiles = None if grammars is None else grammars.compile
        super().__init__(Engine(self.scheduler, self.runner, options, compile_grammar=compiles, drafter=drafter))
