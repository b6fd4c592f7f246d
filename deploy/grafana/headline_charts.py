"""Charts of the first row: is it up, is it proven, is it fast, does it fail. Each is one number."""

from chart import DISPATCHES, FALLBACKS, MODEL, TTFT, WHERE, Chart, Kind, quantile, rate

_DISPATCHES = f"hallmark_attention_dispatch_total{{{MODEL}, {WHERE}}}"
_PROVEN = f'hallmark_attention_dispatch_total{{{MODEL}, {WHERE}, status=~"proven|provisional"}}'
_FAILED = rate("hallmark_requests_total", WHERE, 'outcome="server_error"')

HEADLINE = (
    Chart(
        "Engines up",
        "Ready, of those that are scraped.",
        "none",
        ((f"sum(hallmark_engine_up{{{WHERE}}})", ""),),
        Kind.NUMBER,
        4,
        detail="Engines up",
    ),
    Chart(
        "Served by proven kernels",
        "Share of dispatches whose evidence is proven or provisional, over the range shown.",
        "percentunit",
        (
            (
                f"sum(increase({_PROVEN}[$__range])) / sum(increase({_DISPATCHES}[$__range]))",
                "",
            ),
        ),
        Kind.NUMBER,
        4,
        detail="Dispatches by status of their evidence",
    ),
    Chart(
        "Fallbacks, share",
        "Of dispatches now. Anything above 0 pages.",
        "percentunit",
        ((f"(sum({FALLBACKS}) or vector(0)) / sum({DISPATCHES})", ""),),
        Kind.NUMBER,
        4,
        detail="Fallbacks by reason",
    ),
    Chart(
        "p99 time to first token, worst bucket",
        "Now, of the bucket that is slowest.",
        "s",
        ((f"max({quantile(0.99, TTFT, 'model', 'bucket')})", ""),),
        Kind.NUMBER,
        4,
        detail="p99 now",
    ),
    Chart(
        "Tokens a second",
        "Generated, by all servers shown.",
        "none",
        ((f"sum({rate('hallmark_generation_tokens_total', WHERE)})", ""),),
        Kind.NUMBER,
        4,
        detail="Tokens a second",
    ),
    Chart(
        "Requests that failed by our fault, a second",
        "Server errors; clients' own and refusals under load are not counted.",
        "ops",
        ((f"sum({_FAILED}) or vector(0)", ""),),
        Kind.NUMBER,
        4,
        detail="Answers by route and outcome",
    ),
)
