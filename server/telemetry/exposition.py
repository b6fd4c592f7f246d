"""A registry as the text that Prometheus scrapes."""

import time

from server.telemetry.registry import Registry

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_LINES_AT_ONCE = 50


def expose(registry: Registry, content_type: str) -> bytes:
    """`content_type`: TEXT, or OPENMETRICS, which has exemplars too. Any thread may call this."""
    is_openmetrics = content_type == OPENMETRICS
    parts: list[str] = []
    for family in registry.families:
        for line in family.lines(is_openmetrics):
            parts.append(line)
            if len(parts) % _LINES_AT_ONCE == 0:
                time.sleep(0)  # lets the event loop's thread have the interpreter: no token waits for all of this
    if is_openmetrics:
        parts.append("# EOF\n")
    return "".join(parts).encode()
