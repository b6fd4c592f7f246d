"""One line an event on standard error: time, level, logger, message, ids. Never a prompt."""

import copy
import logging
import sys
import warnings
from datetime import UTC, datetime
from traceback import extract_tb
from types import TracebackType
from typing import TextIO

import msgspec

from server.settings import LogFormat

_HOME = __name__.removesuffix("server.log")  # "", and "hallmark." in an installed package: loggers are named alike
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# What a record may carry besides its message, by `extra`: ids and numbers. Anything else is left out.
FIELDS = (
    "request_id",
    "trace_id",
    "key",
    "status",
    "outcome",
    "code",
    "param",
    "ms",
    "kernels",
    "kernel_status",
    "step",
)


class LineFormatter(logging.Formatter):
    """Keeps every record on one line, and of an exception its type and frames: its text may quote a request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")

    def formatException(self, ei: ExcInfo) -> str:
        kind, _, traceback = ei
        frames = [f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in extract_tb(traceback)]
        return f"{kind.__name__ if kind else 'no exception'} at {' < '.join(reversed(frames))}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields_of(record))])

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_without_text(record)).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(LineFormatter):
    """The same as an object, for machines: time, level, logger, message, the fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name.removeprefix(_HOME),
            "message": record.getMessage(),
            **dict(fields_of(record)),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event).decode()


def fields_of(record: logging.LogRecord) -> list[tuple[str, object]]:
    """The fields that `extra` gave it."""
    given = record.__dict__
    return [(name, value) for name in FIELDS if (value := given.get(name)) is not None]


def trace_fields(request_id: str, traceparent: str | None) -> dict[str, str]:
    """`extra` for what happens to a request where only its W3C header is known: in the engine's process."""
    ids = {"request_id": request_id}
    return ids if traceparent is None else {**ids, "trace_id": traceparent.split("-")[1]}


def configure_logging(log_format: LogFormat = LogFormat.AUTO, stream: TextIO = sys.stderr) -> None:
    """Send this process's log to `stream`. Called by the command line, and by the engine's process."""
    is_json = log_format is LogFormat.JSON or (log_format is LogFormat.AUTO and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if is_json else LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn.error", "uvicorn.access", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of a client's broken image, whose request is answered
    # The exporters log every batch that they lose; telemetry/export.py counts them, and says so once a minute.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _without_text(record: logging.LogRecord) -> logging.LogRecord:
    record = copy.copy(record)
    record.exc_text = None  # another handler's formatter may have left the full traceback there
    record.name = record.name.removeprefix(_HOME)
    return record
