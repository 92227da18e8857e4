"""Logging of llamaq's processes. Only entry points call this: importing a library must not configure logging."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(name)s[%(process)d] %(message)s"

log = logging.getLogger(__name__)

_PASSWORD = re.compile(r"(://[^\s/@:]*:)[^\s/@]+@")
"""The password in a URL, such as that of Redis."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Maps each control character, except the tab and the line feed, to its code."""
_EVENT = re.compile(r"[a-z_]+(?:\.[a-z_]+)+(?=[\s:]|$)")
"""The event at the beginning of a message: `job.admitted id=%s slot=%d`."""
_PLACEHOLDER = re.compile(r"(?:\b(\w+)=)?%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")
"""A placeholder in a message, with the name of its value if it has one."""


class LogFormat(StrEnum):
    """The form of log messages."""

    TEXT = "text"
    """Lines for people."""
    JSON = "json"
    """One JSON object on each line, for programs that collect logs."""


class TextFormatter(logging.Formatter):
    """Formats each message as text that cannot control a terminal: an error of redis-py may contain any bytes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as text."""
        return super().format(record).translate(CONTROLS)


class JsonFormatter(logging.Formatter):
    """Formats each message as one line of JSON.

    The object has `time` (UTC), `level`, `logger`, `process` (its id) and `message`. A message of the form
    `job.admitted slot=3` also has `event` and its values by name. The traceback of an exception is in `exception`.
    Passwords of URLs are replaced by `***`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as JSON."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if event := _EVENT.match(entry["message"]):
            entry["event"] = event[0]
            for name, value in _named_values(record):
                entry.setdefault(name, value if _is_plain(value) else str(value))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        masked = {name: mask_passwords(value) if isinstance(value, str) else value for name, value in entry.items()}
        return json.dumps(masked)


def _named_values(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Yield the values of a message that have a name in front of them."""
    if not isinstance(record.args, tuple):
        return
    values = iter(record.args)
    for found in _PLACEHOLDER.finditer(str(record.msg)):
        if not found[0].endswith("%%"):
            value = next(values, None)
            if found[1] is not None:
                yield found[1], value


def _is_plain(value: object) -> bool:
    """Return whether JSON has a form for this value. It has none for numbers that are not finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def mask_passwords(text: str) -> str:
    """Return a text with `***` in place of the passwords of URLs."""
    return _PASSWORD.sub(r"\1***@", text)


def configure_logging(level: str, form: LogFormat = LogFormat.TEXT) -> None:
    """Log messages of at least `level` to standard error.

    With `LogFormat.JSON`, warnings of Python and errors that end a thread or the process are messages too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(FORMAT) if form is LogFormat.TEXT else JsonFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())
    if form is LogFormat.TEXT:
        return
    logging.captureWarnings(True)
    sys.excepthook = _log_crash
    threading.excepthook = _log_thread_crash


def _log_crash(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    log.critical("process.crashed", exc_info=(kind, error, traceback))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is not None:
        name = None if crash.thread is None else crash.thread.name
        log.critical("thread.crashed thread=%s", name, exc_info=(crash.exc_type, crash.exc_value, crash.exc_traceback))
