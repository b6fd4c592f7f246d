"""Charts of what clients see: objectives, times to the first token, a rollout's two sides."""

from chart import DISPATCHES, FALLBACKS, MODEL, TTFT, WHERE, WHO, Chart, Kind, quantile, rate

OBJECTIVES = (
    Chart(
        "Good events",
        "Share of events within their objective, over the range shown. Every event is counted exactly.",
        "percentunit",
        (
            (
                f'sum by (sli) (increase(hallmark_slo_events_total{{{MODEL}, {WHERE}, result="good"}}[$__range]))'
                f" / sum by (sli) (increase(hallmark_slo_events_total{{{MODEL}, {WHERE}}}[$__range]))",
                "{{sli}}",
            ),
            ("max by (sli) (hallmark_slo_target_ratio)", "{{sli}} objective"),
        ),
        Kind.NUMBER,
        width=8,
    ),
    Chart(
        "Latency budget: burn over 1 h",
        "1 spends the budget of the period exactly; above 14.4 over an hour pages.",
        "none",
        ((f'model_bucket_sli:hallmark_slo_burn:rate1h{{{MODEL}, sli=~"ttft|tpot"}}', "{{model}} {{bucket}} {{sli}}"),),
        width=8,
    ),
    Chart(
        "Availability budget: burn",
        "Of requests that failed by our fault, over 5 minutes and over an hour.",
        "none",
        (
            (f"model:hallmark_slo_availability_burn:rate5m{{{MODEL}}}", "{{model}} 5 min"),
            (f"model:hallmark_slo_availability_burn:rate1h{{{MODEL}}}", "{{model}} 1 h"),
        ),
        width=8,
    ),
)

FIRST_TOKENS = (
    Chart(
        "p99 now",
        "Of few requests it is noise: look at the counts. Points are exemplars; each links to its trace.",
        "s",
        ((quantile(0.99, TTFT, "model", "bucket"), "{{model}} {{bucket}}"),),
        width=8,
        has_exemplars=True,
    ),
    Chart(
        "p50 over 5 min",
        "Absent below 20 requests in 5 minutes.",
        "s",
        ((f"model_bucket:{TTFT}:p50_5m{{{MODEL}}}", "{{model}} {{bucket}}"),),
        width=8,
    ),
    Chart(
        "p99 over 1 h",
        "Absent below 300 requests an hour: a p99 of fewer is noise.",
        "s",
        ((f"model_bucket:{TTFT}:p99_1h{{{MODEL}}}", "{{model}} {{bucket}}"),),
        width=8,
    ),
    Chart(
        "Requests in the hour",
        "The sample count behind the p99.",
        "none",
        ((f"model_bucket:{TTFT}_count:increase1h{{{MODEL}}}", "{{model}} {{bucket}}"),),
        width=8,
    ),
    Chart(
        "Prefill apart: p99",
        "From the first schedule to the first token, without the queue and without decoding.",
        "s",
        ((quantile(0.99, "hallmark_prefill_seconds", "model", "bucket"), "{{model}} {{bucket}}"),),
        width=8,
        has_exemplars=True,
    ),
    Chart(
        "Time per output token: p99",
        "Mean time between a request's tokens, by the length of its prompt.",
        "s",
        ((quantile(0.99, "hallmark_time_per_output_token_seconds", "model", "bucket"), "{{model}} {{bucket}}"),),
        width=8,
        has_exemplars=True,
    ),
)

ROLLOUT = (
    Chart(
        "What runs",
        "A fingerprint changes with any part of the machine or its software. Two for long are half a rollout.",
        "none",
        ((f"count by (fingerprint, version, gpu, driver, torch, triton) (hallmark_build_info{{{WHERE}}})", ""),),
        Kind.TABLE,
        width=6,
    ),
    Chart(
        "p99 TTFT, stable against canary",
        "By fingerprint and version: compare the same bucket only.",
        "s",
        (
            (
                quantile(0.99, TTFT, "fingerprint", "version", "bucket", who=WHO),
                "{{version}} {{fingerprint}} {{bucket}}",
            ),
        ),
        width=6,
    ),
    Chart(
        "Requests a second",
        "How the traffic is split between the fingerprints.",
        "reqps",
        ((f"sum by (fingerprint, version) ({rate(TTFT + '_count', WHERE)} {WHO})", "{{version}} {{fingerprint}}"),),
        width=6,
    ),
    Chart(
        "Fallback share",
        "Dispatches that fell back, of all, by fingerprint and version.",
        "percentunit",
        (
            (
                f"sum by (fingerprint, version) ({FALLBACKS} {WHO})"
                f" / sum by (fingerprint, version) ({DISPATCHES} {WHO})",
                "{{version}} {{fingerprint}}",
            ),
        ),
        width=6,
    ),
)
