"""A queue with a fake worker. The environment variables select it for the commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.testing import serving


@pytest.fixture
def served(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A queue that the commands use by default. Its fake worker answers with the prompt or the messages."""

    def answer(request: JobRequest) -> list[str]:
        if request.messages:
            return [f"{message.role}: {message.content}\n" for message in request.messages]
        return [f"{word} " for word in (request.prompt or "").split()]

    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    with serving(redis_url, queue, answer):
        yield queue
