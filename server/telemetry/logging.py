"""One line an event on standard error: time, level, logger, message. Ids and numbers, never a prompt."""

import copy
import logging
import sys
from datetime import UTC, datetime
from traceback import extract_tb
from types import TracebackType
from typing import TextIO

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_text = None  # another handler's formatter may have left the full traceback there
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def configure_logging(stream: TextIO = sys.stderr) -> None:
    """Send this process's log to `stream`. Called once, by the command line."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn.error", "uvicorn.access", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
