"""Sets up the log of a process, and says how its children set up theirs.

service      setup_logging(settings.log_style(), "router")
child        setup_logging(config.log, "worker 0 of ..."), where config.log = log_style()
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Literal

import msgspec

from edge.logs.formatters import JsonFormatter, TextFormatter
from edge.logs.unblocked import stderr_handler

LogFormat = Literal["text", "json"]

logger = logging.getLogger(__name__)


class LogStyle(msgspec.Struct, frozen=True):
    """Is how the processes of one service log. `level` is a number of `logging`."""

    level: int = logging.INFO
    format: LogFormat = "text"


def setup_logging(style: LogStyle, process: str, *, is_child: bool = False) -> None:
    """Logs to standard error, and waits for no reader of it. `process` names the process; in text,
    only a child's is written. Does nothing where logging is set up already."""
    is_json = style.format == "json"
    handler = stderr_handler()
    handler.setFormatter(
        JsonFormatter(process) if is_json else TextFormatter(process if is_child else "")
    )
    logging.basicConfig(level=style.level, handlers=[handler])
    if is_json:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def log_style() -> LogStyle:
    """Returns how this process logs; its children do alike."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return LogStyle(root.getEffectiveLevel(), "json" if is_json else "text")


def tell_failure(program: str, error: Exception) -> None:
    """Tells on standard error why a program ends: a line for people, or one of the log."""
    if log_style().format == "json":
        logger.critical("%s: %s", program, error)
    else:
        print(f"{program}: {error}", file=sys.stderr)


def _log_uncaught_in_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None:
        error = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        logger.critical("a thread ends: %s", ended.exc_type.__name__, exc_info=error)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logger.critical("the process ends: %s", kind.__name__, exc_info=(kind, error, traceback))
