"""An error does not end the conversation of `llamaq chat`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.cli.answer_sources import Answers, Messages
from llamaq.cli.interactive_chat import Conversation
from llamaq.producer import FinishReason

REFUSED = RedisConnectionError("Connection refused")


class Pieces:
    """The pieces of an answer, an error after them, and one of the read of the finish reason."""

    def __init__(self, *pieces: str, error: Exception | None = None, error_at_end: Exception | None = None) -> None:
        self._pieces = pieces
        self._error = error
        self._error_at_end = error_at_end

    def __iter__(self) -> Iterator[str]:
        yield from self._pieces
        if self._error is not None:
            raise self._error

    def finish_reason(self) -> FinishReason:
        if self._error_at_end is not None:
            raise self._error_at_end
        return FinishReason.STOP


class FlakyAnswers:
    """Answers each chat, except the second one."""

    def __init__(self, second: Pieces | Exception) -> None:
        self.sent: list[Messages] = []
        self._second = second

    def stream_chat(self, messages: Messages, _options: Any) -> AbstractContextManager[Pieces]:
        self.sent.append(messages)
        answer = self._second if len(self.sent) == 2 else Pieces("an", "swer")
        if isinstance(answer, Exception):
            raise answer
        return nullcontext(answer)


def talk(monkeypatch: pytest.MonkeyPatch, second: Pieces | Exception, *lines: str | Exception) -> list[Messages]:
    """Type these lines in a conversation, and return the messages of each request."""
    waiting = iter([*lines, EOFError()])

    def read(_prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    answers = FlakyAnswers(second)
    Conversation(cast(Answers, answers), [], {}).run()
    return answers.sent


def contents(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_an_outage_of_redis_is_a_notice_and_the_conversation_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = talk(monkeypatch, REFUSED, "one", "two", "three")
    assert contents(sent[2]) == ["one", "answer", "three"]
    assert "Redis does not answer: Connection refused" in capsys.readouterr().err


def test_an_outage_in_an_answer_ends_its_line_before_the_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = talk(monkeypatch, Pieces("half", error=REFUSED), "one", "two", "three")
    assert contents(sent[2]) == ["one", "answer", "three"]
    assert "half\n" in capsys.readouterr().out


def test_a_complete_answer_stays_although_its_end_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = talk(monkeypatch, Pieces("all", error_at_end=REFUSED), "one", "two", "three")
    assert contents(sent[2]) == ["one", "answer", "two", "all", "three"]
    assert not capsys.readouterr().err


def test_a_line_that_cannot_be_decoded_is_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UnicodeDecodeError("utf-8", b"\xfc", 0, 1, "invalid start byte")
    sent = talk(monkeypatch, Pieces("fine"), "one", error, "two")
    assert contents(sent[1]) == ["one", "answer", "two"]
    assert "the line is not utf-8" in capsys.readouterr().err
