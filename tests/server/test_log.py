"""Log lines."""

import io
import json
import logging

from server.log import JsonFormatter, LineFormatter, trace_fields


def _lines(write: object, formatter: logging.Formatter | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter or LineFormatter())
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

    plain, as_json = _lines(write), _lines(write, JsonFormatter())
    assert "ValueError at " in plain
    assert "test_log.py" in plain
    assert json.loads(as_json)["exception"].startswith("ValueError at ")
    for text in (plain, as_json):
        assert "a prompt" not in text
        assert text.count("\n") == 1


def test_json_has_the_fields_beside_the_message() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    fields = {"ms": 1.5, "status": None, **trace_fields("r-1", traceparent)}
    text = _lines(lambda logger: logger.info("%s ended", "POST", extra=fields), JsonFormatter())
    event = json.loads(text)
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "level": "INFO",
        "logger": "server.test",
        "message": "POST ended",
        "request_id": "r-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "ms": 1.5,
    }


def test_a_line_has_the_fields_behind_the_message() -> None:
    line = _lines(lambda logger: logger.info("POST", extra={"request_id": "r-1", "ms": 1.5}))
    assert line.endswith("POST request_id=r-1 ms=1.5\n")


def test_a_field_that_is_not_on_the_list_is_not_logged() -> None:
    for formatter in (LineFormatter(), JsonFormatter()):
        assert "secret" not in _lines(lambda logger: logger.info("x", extra={"prompt": "secret"}), formatter)
