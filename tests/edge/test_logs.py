"""Log lines are for people, or a JSON object each that names the request; never content."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from edge.logs.formatters import JsonFormatter, TextFormatter, with_fields
from edge.logs.request_log import RequestLog, note_facts
from edge.logs.settings import LogSettings
from edge.logs.setup import LogStyle, log_style, setup_logging, tell_failure
from edge.tracing.context import TraceContext, current_trace

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", request_id="req-7")


@contextlib.contextmanager
def bare_root() -> Iterator[io.StringIO]:
    """Makes a process whose log is not set up yet; gives its standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    root.handlers.clear()
    logging.captureWarnings(False)  # Libraries may have asked for it.
    token = current_trace.set(None)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            yield stderr
    finally:
        current_trace.reset(token)
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        sys.excepthook, threading.excepthook = hooks
        root.setLevel(level)


def lines(stderr: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.getvalue().splitlines()]


def test_every_line_is_an_object() -> None:
    with bare_root() as stderr:
        setup_logging(LogSettings(log_format="json", log_level="debug").log_style(), "router")
        logger = logging.getLogger("router.relay")
        logger.debug("two\nlines, and a %s", "sn\u00f6wman \u2603 \ud800")
        current_trace.set(TRACE)
        logger.warning("of a request", extra=with_fields(tokens=3, seconds=0.5))
        try:
            raise ValueError("broken\nhere")
        except ValueError:
            logger.exception("it failed")
        warnings.warn("something old", stacklevel=1)
        plain, asked, failed, warned = lines(stderr)
        assert plain["message"] == "two\nlines, and a sn\u00f6wman \u2603 \ud800"
        assert (plain["level"], plain["logger"], plain["process"]) == (
            "debug",
            "router.relay",
            "router",
        )
        assert plain["time"].endswith("Z") and len(plain["time"]) == len("2026-11-22T13:08:44.123Z")
        assert "request_id" not in plain and "stack" not in plain
        assert (asked["request_id"], asked["trace_id"]) == ("req-7", TRACE.trace_id)
        assert (asked["tokens"], asked["seconds"]) == (3, 0.5)
        assert (
            failed["stack"].startswith("Traceback")
            and "ValueError: broken\nhere" in failed["stack"]
        )
        assert "something old" in warned["message"]


def test_what_ends_a_process_is_an_object_too() -> None:
    with bare_root() as stderr:
        setup_logging(LogStyle(format="json"), "decode")
        tell_failure("decode node", OSError("no such\nmodel"))
        error = ValueError("unforeseen")
        sys.excepthook(ValueError, error, None)
        thread = threading.Thread(target=int, args=("no number",))
        thread.start()
        thread.join()
        told, uncaught, in_thread = lines(stderr)
        assert "invalid literal" in in_thread["stack"] and in_thread["level"] == "critical"
        assert told["message"] == "decode node: no such\nmodel"
        assert (told["level"], uncaught["level"]) == ("critical", "critical")
        assert "ValueError: unforeseen" in uncaught["stack"]


def test_children_log_as_their_parents() -> None:
    with bare_root():
        assert log_style().format == "text"
        style = LogStyle(logging.WARNING, "json")
        setup_logging(style, "decode")
        assert log_style() == style


def test_lines_for_people() -> None:
    with bare_root() as stderr:
        setup_logging(LogStyle(), "worker 0 of 100%s", is_child=True)
        logging.getLogger("engine").info("ready")
        tell_failure("decode node", OSError("no model"))
        ready, failed = stderr.getvalue().splitlines()
        assert ready.endswith(" INFO worker 0 of 100%s: ready")
        assert failed == "decode node: no model"


def record_of(log: RequestLog, caplog: pytest.LogCaptureFixture) -> logging.LogRecord | None:
    caplog.clear()
    log.begin()
    note_facts(output_tokens=4)
    log.end("POST /v1/completions 200", status=200)
    return caplog.records[0] if caplog.records else None


def test_a_line_for_each_request_if_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert record_of(RequestLog(), caplog) is None
    record = record_of(RequestLog(is_on=True), caplog)
    assert record is not None
    current_trace.set(TRACE)
    told = json.loads(JsonFormatter("decode").format(record))
    assert told["message"] == "POST /v1/completions 200"
    assert (told["status"], told["output_tokens"], told["request_id"]) == (200, 4, "req-7")
    text = TextFormatter().format(record)
    assert text.endswith("POST /v1/completions 200 status=200 output_tokens=4 request_id=req-7")
    current_trace.set(None)
