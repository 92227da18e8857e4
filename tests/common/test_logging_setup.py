"""Log messages as JSON: one line each, with the values of the message and the traceback, without passwords."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from llamaq.common.logging_setup import FORMAT, JsonFormatter, TextFormatter


def formatted(message: object, *arguments: object, **values: Any) -> dict[str, Any]:
    record = logging.LogRecord("llamaq.test", logging.WARNING, __file__, 1, message, arguments, None)
    record.__dict__.update(values)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry: dict[str, Any] = json.loads(line)
    return entry


def test_an_event_and_its_values_are_fields() -> None:
    entry = formatted("job.admitted id=%s slot=%d share=%.2f of %s%% %r", "q.0.a", 3, 0.123, 9, "x")
    assert entry["message"] == "job.admitted id=q.0.a slot=3 share=0.12 of 9% 'x'"
    expected = {"level": "warning", "logger": "llamaq.test", "event": "job.admitted", "id": "q.0.a", "slot": 3}
    assert entry.items() >= expected.items()
    assert entry["share"] == 0.123
    assert entry["time"].endswith("+00:00")


def test_a_value_does_not_replace_a_field_of_the_message() -> None:
    entry = formatted("child.died level=%s error=%s", "high", OSError("gone"))
    assert (entry["level"], entry["error"]) == ("warning", "gone")


@pytest.mark.parametrize("message", ["plain text", "", 5, ValueError("an error as the message"), "100 % of it"])
def test_other_messages_have_no_event(message: object) -> None:
    entry = formatted(message)
    assert (entry["message"], "event" in entry) == (str(message), False)


def test_a_number_that_is_not_finite_is_a_text() -> None:
    assert formatted("a.b share=%s", float("nan"))["share"] == "nan"


def test_line_breaks_and_special_characters_stay_on_one_line() -> None:
    assert formatted("a.b text=%s", 'two\nlines "and" \u2028 \udc80')["text"] == 'two\nlines "and" \u2028 \udc80'


def test_a_text_message_shows_control_characters_and_keeps_line_breaks() -> None:
    record = logging.LogRecord(
        "a", logging.WARNING, __file__, 1, "b.c error=%s", ("\x00\x1b[31m\x9b\ttab\nline",), None
    )
    assert TextFormatter(FORMAT).format(record).endswith("b.c error=\\x00\\x1b[31m\\x9b\ttab\nline")


def test_passwords_of_urls_are_masked_everywhere() -> None:
    try:
        raise ValueError("redis://user:secret@host/0")
    except ValueError:
        entry = formatted("redis.error url=%s", "rediss://:secret@host:6379", exc_info=sys.exc_info())
    assert "secret" not in json.dumps(entry)
    assert entry["url"] == "rediss://:***@host:6379"
    assert "ValueError: redis://user:***@host/0" in entry["exception"]


@pytest.mark.starts_processes
def test_a_crash_of_the_process_and_of_a_thread_and_a_warning_are_messages_on_one_line() -> None:
    code = """
import threading, warnings
from llamaq.common.logging_setup import LogFormat, configure_logging
configure_logging("info", LogFormat.JSON)
def crash(): raise ValueError("in a thread")
thread = threading.Thread(target=crash, name="a-thread")
thread.start()
thread.join()
warnings.warn("a warning")
raise KeyError("in the process")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    thread, warning, process = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (thread["event"], thread["thread"], thread["level"]) == ("thread.crashed", "a-thread", "critical")
    assert "ValueError: in a thread" in thread["exception"]
    assert "a warning" in warning["message"]
    assert (process["event"], ended.returncode) == ("process.crashed", 1)
    assert "KeyError: 'in the process'" in process["exception"]
