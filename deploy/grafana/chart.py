"""A chart as data, and the expressions that many share."""

from dataclasses import dataclass
from enum import Enum

TTFT = "hallmark_time_to_first_token_seconds"
MODEL = 'model=~"$model"'
WHERE = 'instance=~"$instance"'
RANGE = "[$__rate_interval]"
# Adds what runs on the instance to its series: the rollout's two sides.
WHO = "* on (job, instance) group_left (fingerprint, version) hallmark_build_info"


class Kind(Enum):
    LINES = "lines"
    SHARES = "shares"  # stacked to 100%
    NUMBER = "number"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    about: str
    unit: str  # of Grafana's unit ids
    queries: tuple[tuple[str, str], ...]  # PromQL and legend
    kind: Kind = Kind.LINES
    width: int = 12  # of 24
    has_exemplars: bool = False
    detail: str = ""  # the title of the chart behind this number, to which its panel links


def rate(metric: str, *matchers: str) -> str:
    return f"rate({metric}{{{', '.join(matchers)}}}{RANGE})"


def quantile(share: float, metric: str, *by: str, who: str = "") -> str:
    """A quantile of summed rates of a histogram's buckets."""
    buckets = rate(f"{metric}_bucket", MODEL, WHERE)
    return f"histogram_quantile({share}, sum by ({', '.join((*by, 'le'))}) ({buckets}{' ' + who if who else ''}))"


TFLOPS = f"hallmark_attention_achieved_tflops{{{WHERE}}}"
BANDWIDTH = f"hallmark_attention_achieved_bytes_per_second{{{WHERE}}}"
DISPATCHES = rate("hallmark_attention_dispatch_total", MODEL, WHERE)
FALLBACKS = rate("hallmark_attention_fallback_total", MODEL, WHERE)
