"""An error does not end the conversation of `llamaq chat`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.cli.answer_sources import Answers, Messages
from llamaq.cli.interactive_chat import Conversation
from llamaq.producer import FinishReason


class Pieces(list[str]):
    def finish_reason(self) -> FinishReason:
        return FinishReason.STOP


class FlakyAnswers:
    """Answers each chat, except the second one, for which Redis does not answer."""

    def __init__(self) -> None:
        self.sent: list[Messages] = []

    def stream_chat(self, messages: Messages, _options: Any) -> AbstractContextManager[Pieces]:
        self.sent.append(messages)
        if len(self.sent) == 2:
            raise RedisConnectionError("Connection refused")
        return nullcontext(Pieces(["an", "swer"]))


def test_an_outage_of_redis_is_a_notice_and_the_conversation_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "two", "three"])

    def read(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    answers = FlakyAnswers()
    Conversation(cast(Answers, answers), [], {}).run()
    assert [message["content"] for message in answers.sent[2]] == ["one", "answer", "three"]
    assert "Redis does not answer: Connection refused" in capsys.readouterr().err
