"""Receives the progress of a prompt from before the submit on, because it is not stored."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack, suppress

from redis.asyncio import Redis

from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import JobKeys
from llamaq.producer.streaming.event_reader import INBOX_EVENTS, EventReader
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.job_state import StoredState
from llamaq.producer.streaming.subscriber import Subscriber

CONFIRM_S = 0.25
"""Longest wait for the confirmation of the subscription. A job is submitted also without it."""


class EarlyProgress(JobListener):
    """Keeps the progress that is published before the first chunk of a stream is wanted. It belongs to one stream."""

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        super().__init__(redis, keys, job_id)
        self._payloads: deque[bytes] = deque(maxlen=INBOX_EVENTS)
        self._is_confirmed = False
        self._listening = ExitStack()

    def __repr__(self) -> str:
        return f"<EarlyProgress {self.job_id} events={len(self._payloads)}>"

    async def listen(self, subscriber: Subscriber) -> None:
        """Subscribe, and wait until the server has confirmed that, but not for long."""
        self._listening.enter_context(subscriber.listening(self))
        if not self._is_confirmed:
            with suppress(TimeoutError):
                await self._wait_until(asyncio.get_running_loop().time() + CONFIRM_S)

    def pass_to(self, reader: EventReader) -> None:
        """Pass the progress to a reader that listens now, and listen no more."""
        for payload in self._payloads:
            reader.deliver(payload)
        self.stop()

    def stop(self) -> None:
        """Listen no more. May be called twice."""
        self._payloads.clear()
        self._listening.close()

    @property
    def is_receiving(self) -> bool:
        """A long silence is normal."""
        return False

    def deliver(self, payload: bytes) -> None:
        """Keep the progress of the prompt. Everything else is stored in Redis."""
        if codec.is_prompt_progress(payload):
            self._payloads.append(payload)

    def reread(self) -> None:
        """Note that the subscription is confirmed."""
        self._is_confirmed = True
        self._wait.wake()

    def update_state(self, state: StoredState) -> None:
        """Ignore the state of the job."""

    async def _read(self) -> None:
        """Read nothing."""
