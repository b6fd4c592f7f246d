"""Log lines."""

import io
import logging

from server.telemetry.logging import LineFormatter


def _lines(write: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("server.test")
    logger.addHandler(handler)
    write(logger)  # type: ignore[operator]
    return stream.getvalue()


def test_an_event_is_one_line_with_time_level_and_logger() -> None:
    line = _lines(lambda logger: logger.info("request %s ended", "r-1"))
    time, level, name, message = line.rstrip("\n").split(" ", 3)
    assert time.endswith("+00:00")
    assert (level, name, message) == ("INFO", "server.test", "request r-1 ended")


def test_a_line_break_in_a_value_cannot_forge_a_line() -> None:
    text = _lines(lambda logger: logger.info("id=%s", "a\n2026 INFO server forged\r"))
    assert text.count("\n") == 1
    assert "\r" not in text


def test_of_an_exception_only_its_type_and_frames_are_logged() -> None:
    def write(logger: logging.Logger) -> None:
        try:
            raise ValueError("a prompt")
        except ValueError:
            logger.exception("failed")

    text = _lines(write)
    assert "ValueError at " in text
    assert "test_logging.py" in text
    assert "a prompt" not in text
    assert text.count("\n") == 1
