"""State of the engine process: its steps, its queue, its cache, its ends."""

import time

from kernels.linear.library.fallback_reason import MatmulFallback
from server.protocol.liveness import DeathCause
from server.protocol.messages import EngineReady, Heartbeat, StateCounts, StepRecord
from server.telemetry.factory import MetricFactory
from server.telemetry.outcomes import DraftPlace, OomStage, Restore, SlotContent


class EngineMetrics:
    def __init__(self, make: MetricFactory) -> None:
        # Read at each scrape: a step then costs an assignment each, and not a lock (0.4 us).
        self.num_running = 0
        self.num_waiting = 0
        self.kv_usage = 0.0
        self._last_step_at = 0.0
        running = make.gauge("requests_running", "Sequences that the engine computes")
        running.set_function(lambda: self.num_running)
        waiting = make.gauge("requests_waiting", "Sequences that wait in the engine")
        waiting.set_function(lambda: self.num_waiting)
        kv_usage = make.gauge("kv_cache_usage_ratio", "Used share of the KV cache's pages")
        kv_usage.set_function(lambda: self.kv_usage)
        self._prefix_queried = make.counter(
            "prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = make.counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens found there, hence not computed again"
        )
        self._preemptions = make.counter("preemptions_total", "Sequences that lost their pages and were computed anew")
        self._page_mismatches = make.counter(
            "kv_page_mismatches_total", "Pages of the prefix cache dropped at a hit: they held other tokens or bytes"
        )
        self._state_slots = make.gauge(
            "state_slots", "Slots of recurrent states by what they hold; of a model with recurrent layers", "content"
        )
        self._restores = make.counter(
            "state_restores_total",
            "Prompts of such a model whose pages were found, by whether a snapshot of the state was found as far",
            "result",
        )
        self._num_slots = 0
        self._drafted = make.counter("drafted_tokens_total", "Drafted tokens that were verified", "place")
        self._accepted = make.counter("accepted_tokens_total", "Those that were chosen as they were drafted", "place")
        self._undrafted = make.counter(
            "undrafted_steps_total", "Steps in which too many sequences decoded for any token to be drafted"
        )
        self._nonfinite = make.counter("nonfinite_logits_total", "Sequences ended because no logit was finite")
        self._images = make.counter("images_total", "Images that the tower computed")
        self._image_tokens = make.counter("image_tokens_total", "Tokens of these images")
        self._tower_s = make.counter("tower_seconds_total", "Time of the device that they took")
        self._ooms = make.counter("gpu_oom_total", "Steps that the device's memory did not suffice for", "stage")
        self._up = make.gauge("engine_up", "1 while the engine is ready")
        self._steps = make.counter("engine_steps_total", "Steps of the engine")
        last_step_at = make.gauge("engine_last_step_timestamp_seconds", "When the last step ended")
        last_step_at.set_function(lambda: self._last_step_at)
        self._restarts = make.counter("engine_restarts_total", "Engine processes that ended unasked", "cause")
        self._matmul_fallbacks = make.counter(
            "matmul_fallback_total",
            "Products of many rows a rank left to PyTorch: all of a start, or of one weight and one number of rows",
            "reason",
        )
        self._unshared = make.counter(
            "peer_memory_refused_total", "Starts of several ranks that CUDA let share no memory: their sums go by NCCL"
        )
        for reason in MatmulFallback:
            self._matmul_fallbacks.labels(reason.value)
        for cause in DeathCause:
            self._restarts.labels(cause.value)
        for stage in OomStage:
            self._ooms.labels(stage.value)

    def ready(self, ready: EngineReady) -> None:
        self._up.set(1)
        self._fell_back(ready.matmul_fallbacks)
        if not ready.has_peer_memory:
            self._unshared.inc()
        for place in list(DraftPlace)[: 0 if ready.drafts is None else ready.drafts.num_tokens]:
            for counter in (self._drafted, self._accepted):
                counter.labels(place.value)
        if ready.states is not None:
            self._num_slots = ready.states.num_slots
            self._counted_states(StateCounts(0, 0, 0, 0))

    def refused(self) -> None:
        self._up.set(0)

    def stepped(self, record: StepRecord) -> None:
        self._steps.inc()
        self._last_step_at = time.time()
        self.num_running = record.num_running
        self.num_waiting = record.num_waiting
        self.kv_usage = record.num_pages_used / record.num_pages
        for counter, amount in (
            (self._prefix_queried, record.num_prefix_queried_tokens),
            (self._prefix_hits, record.num_prefix_hit_tokens),
            (self._preemptions, record.num_preemptions),
            (self._page_mismatches, record.num_page_mismatches),
            (self._nonfinite, record.num_nonfinite),
            (self._undrafted, record.num_undrafted_steps),
        ):
            if amount:
                counter.inc(amount)
        for it in record.tower_times:
            self._images.inc(it.num_images)
            self._image_tokens.inc(it.num_tokens)
            self._tower_s.inc(it.seconds)
        self._fell_back(record.matmul_fallbacks)
        if record.drafts is not None:
            for counter, counts in ((self._drafted, record.drafts.drafted), (self._accepted, record.drafts.accepted)):
                for place, count in zip(DraftPlace, counts, strict=False):
                    counter.labels(place.value).inc(count)
        if record.states is not None:
            self._counted_states(record.states)
        if record.oom_stage is not None:
            self._ooms.labels(OomStage(record.oom_stage).value).inc()

    def _counted_states(self, states: StateCounts) -> None:
        num_free = self._num_slots - states.num_used - states.num_snapshots
        counts = {SlotContent.SEQUENCE: states.num_used, SlotContent.SNAPSHOT: states.num_snapshots}
        for content, count in {**counts, SlotContent.FREE: num_free}.items():
            self._state_slots.labels(content.value).set(count)
        self._restores.labels(Restore.HIT.value).inc(states.num_restored)
        self._restores.labels(Restore.MISS.value).inc(states.num_missed)

    def _fell_back(self, counts: dict[MatmulFallback, int]) -> None:
        for reason, count in counts.items():
            self._matmul_fallbacks.labels(reason.value).inc(count)

    def beat(self, heartbeat: Heartbeat) -> None:
        self.num_running = heartbeat.num_running
        self.num_waiting = heartbeat.num_waiting

    def died(self, cause: str) -> None:
        self._up.set(0)
        self.num_running = 0
        self.num_waiting = 0
        if self._num_slots:
            self._counted_states(StateCounts(0, 0, 0, 0))
        self.kv_usage = 0.0  # or a full cache would be reported until the next engine's first step
        self._restarts.labels(cause).inc()
