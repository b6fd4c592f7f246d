"""Where the engine process stands: its steps, its queue, its cache, its ends."""

import time

from kernels.linear.fallbacks import MatmulFallback
from server.protocol.death import DeathCause
from server.protocol.messages import EngineReady, Heartbeat, StepRecord
from server.telemetry.outcomes import OomStage
from server.telemetry.registry import Maker


class EngineMetrics:
    def __init__(self, make: Maker) -> None:
        self._running = make.gauge("requests_running", "Sequences that the engine computes").of()
        self._waiting = make.gauge("requests_waiting", "Sequences that wait in the engine").of()
        self._kv_usage = make.gauge("kv_cache_usage_ratio", "Used share of the KV cache's pages").of()
        self._prefix_queried = make.counter(
            "prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache"
        ).of()
        self._prefix_hits = make.counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens found there, hence not computed again"
        ).of()
        self._preemptions = make.counter(
            "preemptions_total", "Sequences that lost their pages and were computed anew"
        ).of()
        self._nonfinite = make.counter("nonfinite_logits_total", "Sequences ended because no logit was finite").of()
        self._ooms = make.counter("gpu_oom_total", "Steps that the device's memory did not suffice for", "stage")
        self._up = make.gauge("engine_up", "1 while the engine is ready").of()
        self._steps = make.counter("engine_steps_total", "Steps of the engine").of()
        self._last_step_at = make.gauge("engine_last_step_timestamp_seconds", "When the last step ended").of()
        self._restarts = make.counter("engine_restarts_total", "Engine processes that ended unasked", "cause")
        self._matmul_fallbacks = make.counter(
            "matmul_fallback_total",
            "Products of many rows left to PyTorch: all those of a start, or those of one weight and number of rows",
            "reason",
        )
        for reason in MatmulFallback:
            self._matmul_fallbacks.of(reason.value)
        for cause in DeathCause:
            self._restarts.of(cause.value)
        for stage in OomStage:
            self._ooms.of(stage.value)

    def ready(self, ready: EngineReady) -> None:
        self._up.set(1)
        self._fell_back(ready.matmul_fallbacks)

    def refused(self) -> None:
        self._up.set(0)

    def stepped(self, record: StepRecord) -> None:
        self._steps.inc()
        self._last_step_at.set(time.time())
        self._running.set(record.num_running)
        self._waiting.set(record.num_waiting)
        self._kv_usage.set(record.num_pages_used / record.num_pages)
        self._prefix_queried.inc(record.num_prefix_queried_tokens)
        self._prefix_hits.inc(record.num_prefix_hit_tokens)
        self._preemptions.inc(record.num_preemptions)
        self._nonfinite.inc(record.num_nonfinite)
        self._fell_back(record.matmul_fallbacks)
        if record.oom_stage is not None:
            self._ooms.of(OomStage(record.oom_stage).value).inc()

    def _fell_back(self, counts: dict[MatmulFallback, int]) -> None:
        for reason, count in counts.items():
            self._matmul_fallbacks.of(reason.value).inc(count)

    def beat(self, heartbeat: Heartbeat) -> None:
        self._running.set(heartbeat.num_running)
        self._waiting.set(heartbeat.num_waiting)

    def died(self, cause: str) -> None:
        self._up.set(0)
        self._running.set(0)
        self._waiting.set(0)
        self._kv_usage.set(0)  # or a full cache would be told until the next engine's first step
        self._restarts.of(cause).inc()
