"""Charts of the service: engine, memory, transport and telemetry."""

from chart import WHERE, Chart, Kind, rate

ENGINE = (
    Chart("Engines up", "1 when ready.", "none", ((f"hallmark_engine_up{{{WHERE}}}", "{{instance}}"),), Kind.NUMBER, 4),
    Chart(
        "Requests",
        "Running and waiting.",
        "none",
        (
            (f"sum by (instance) (hallmark_requests_running{{{WHERE}}})", "{{instance}} running"),
            (f"sum by (instance) (hallmark_requests_waiting{{{WHERE}}})", "{{instance}} waiting"),
        ),
        width=5,
    ),
    Chart(
        "Tokens a second",
        "Computed prompts and generated tokens.",
        "none",
        (
            (f"sum by (instance) ({rate('hallmark_prompt_tokens_total', WHERE)})", "{{instance}} prompt"),
            (f"sum by (instance) ({rate('hallmark_generation_tokens_total', WHERE)})", "{{instance}} generated"),
        ),
        width=5,
    ),
    Chart(
        "Steps a second, and the oldest request",
        "A step computes one batch. The oldest request in seconds.",
        "none",
        (
            (f"sum by (instance) ({rate('hallmark_engine_steps_total', WHERE)})", "{{instance}} steps"),
            (f"hallmark_oldest_inflight_seconds{{{WHERE}}}", "{{instance}} oldest, s"),
        ),
        width=5,
    ),
    Chart(
        "Restarts, OOM, non-finite",
        "In an hour. None of them is normal.",
        "none",
        (
            (f"sum by (cause) (increase(hallmark_engine_restarts_total{{{WHERE}}}[1h]))", "restart: {{cause}}"),
            (f"sum by (stage) (increase(hallmark_gpu_oom_total{{{WHERE}}}[1h]))", "out of memory: {{stage}}"),
            (f"sum(increase(hallmark_nonfinite_logits_total{{{WHERE}}}[1h]))", "non-finite logits"),
        ),
        width=5,
    ),
)

MEMORY = (
    Chart(
        "KV cache in use",
        "Share of the pages. Near 1, sequences are preempted and computed again.",
        "percentunit",
        ((f"hallmark_kv_cache_usage_ratio{{{WHERE}}}", "{{instance}}"),),
        width=6,
    ),
    Chart(
        "Prefix cache: hit share",
        "Prompt tokens found in the cache, of those looked up.",
        "percentunit",
        (
            (
                f"sum by (instance) ({rate('hallmark_prefix_cache_hit_tokens_total', WHERE)})"
                f" / sum by (instance) ({rate('hallmark_prefix_cache_queried_tokens_total', WHERE)})",
                "{{instance}}",
            ),
        ),
        width=6,
    ),
    Chart(
        "Preemptions a second",
        "Sequences that lost their pages and are computed anew.",
        "ops",
        ((f"sum by (instance) ({rate('hallmark_preemptions_total', WHERE)})", "{{instance}}"),),
        width=6,
    ),
    Chart(
        "Peak temporary memory",
        "The most a step took beside weights and cache. The math path needs memory quadratic in the length.",
        "bytes",
        ((f"max by (instance, phase) (hallmark_peak_temporary_bytes{{{WHERE}}})", "{{instance}} {{phase}}"),),
        width=6,
    ),
)

TRANSPORT = (
    Chart(
        "Answers by route and outcome",
        "HTTP requests answered, a second.",
        "reqps",
        ((f"sum by (route, outcome) ({rate('hallmark_requests_total', WHERE)}) > 0", "{{route}} {{outcome}}"),),
        width=6,
    ),
    Chart(
        "Turned away",
        "Before the engine saw them.",
        "reqps",
        ((f"sum by (reason) ({rate('hallmark_rejected_total', WHERE)})", "{{reason}}"),),
        width=6,
    ),
    Chart(
        "Clients that left",
        "Before their answer ended.",
        "reqps",
        ((f"sum by (stage) ({rate('hallmark_client_disconnects_total', WHERE)})", "{{stage}}"),),
        width=6,
    ),
    Chart(
        "Event loop: longest delay",
        "Of the last 5 seconds. Every stream stutters by as much.",
        "s",
        ((f"hallmark_event_loop_lag_seconds{{{WHERE}}}", "{{instance}}"),),
        width=6,
    ),
)

TELEMETRY = (
    Chart(
        "Spans that did not reach the collector",
        "The server never waits for the collector; it drops and counts.",
        "ops",
        ((f"sum by (instance) ({rate('hallmark_spans_dropped_total', WHERE)})", "{{instance}}"),),
        width=6,
    ),
    Chart(
        "Scrapes",
        "1 where Prometheus reaches the server.",
        "none",
        (('up{job="hallmark"}', "{{instance}}"),),
        Kind.NUMBER,
        width=6,
    ),
    Chart(
        "Time of a scrape",
        "Served by a thread of its own where there is an admin port.",
        "s",
        (('scrape_duration_seconds{job="hallmark"}', "{{instance}}"),),
        width=6,
    ),
    Chart(
        "Samples of a scrape",
        "At most 1,000 by design.",
        "none",
        (('scrape_samples_scraped{job="hallmark"}', "{{instance}}"),),
        width=6,
    ),
)
