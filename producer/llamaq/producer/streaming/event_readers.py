"""The listeners of a job: `EventReader` reads all its tokens, `EndWaiter` waits until it has ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llamaq.common.errors import JobNotFound, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Event, Failed, Finished, Tokens
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import JobKeys

INBOX_MESSAGES = 256
"""Largest number of live messages that are queued for a slow reader. When one more arrives, the reader drops them and
reads the event stream instead."""
PAGE_EVENTS = 512
"""Largest number of events that one read of the event stream returns."""
OUTAGE_S = 60.0
"""How long a reader retries while Redis cannot be reached."""
RETRY_S = 0.2
"""Delay between two retries."""
TAIL_EVENTS = 4
"""Number of events that are read from the end of the event stream to find its last `tokens` event."""

_ENDED = {JobState.FINISHED.value.encode(), JobState.FAILED.value.encode()}


def has_ended(status: bytes | None) -> bool:
    """Return whether the `status` field of a job's hash is final."""
    return status in _ENDED


class Position:
    """Counts the tokens and characters of a job's output that were read, to detect gaps and repeats in its events."""

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0

    def is_before(self, event: Tokens) -> bool:
        """Return whether output is missing between this position and the event."""
        return event.offset > self.tokens or event.text_offset > self.chars

    def is_at_end_of(self, event: Tokens) -> bool:
        """Return whether the event has no new output."""
        return event.offset + len(event.tokens) <= self.tokens and event.text_offset + len(event.text) <= self.chars

    def advance(self, event: Tokens) -> Tokens | None:
        """Move to the end of the event and return its new output, or None if all of it was read before.

        The caller ensures that the position is not before the event.
        """
        if self.is_at_end_of(event):
            return None
        tokens, text = event.tokens[self.tokens - event.offset :], event.text[self.chars - event.text_offset :]
        new = Tokens(offset=self.tokens, tokens=tokens, text_offset=self.chars, text=text)
        self.tokens += len(tokens)
        self.chars += len(text)
        return new


class EventReader:
    """Reads a job's output from its first token on, in order, without gap or repeat, and its terminal event.

    The reader applies live messages that continue its position. After a message may have been lost,
    the reader is "behind": it drops all live messages until it has read the event stream to the end.
    """

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        self.channel, self.job_key, self.last_heard_s = keys.channel, keys.job, 0.0
        self.position = Position()
        self._redis = redis
        self._events_key = keys.events
        self._job_id = job_id
        self._inbox: deque[bytes] = deque()
        """Live messages that are not decoded yet."""
        self._ready: deque[Tokens | Finished | Failed] = deque()
        """Events for the caller."""
        self._cursor = "-"
        """Start of the next page of the event stream, as an argument of XRANGE."""
        self._must_restart = True
        """Whether the next page is the first one of the event stream."""
        self._is_full_read = False
        """Whether the present read of the event stream started at the beginning of the stream."""
        self._is_behind = False
        self._is_missing = False
        """Whether the job does not exist in Redis."""
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        state = "missing" if self._is_missing else "behind" if self._is_behind else "live"
        return f"<EventReader {self._job_id} {state} tokens={self.position.tokens} inbox={len(self._inbox)}>"

    def deliver(self, payload: bytes) -> None:
        """Queue a live message. While the reader is behind, messages are dropped: the event stream has them too."""
        if self._is_behind:
            return
        if len(self._inbox) >= INBOX_MESSAGES:
            self._fall_behind()
        else:
            self._inbox.append(payload)
            self._wake.set()

    def reread(self) -> None:
        """Read the event stream from its beginning, because a failover of Redis may reset the stream's entry ids."""
        self._must_restart = True
        self._fall_behind()

    def update_status(self, status: bytes | None, n_stored_tokens: int) -> None:
        """Read the event stream if the job has ended or has more tokens than were read."""
        if status is None:
            self._is_missing = True
            self._wake.set()
        elif has_ended(status) or n_stored_tokens > self.position.tokens:
            self._fall_behind()

    async def next_event(self) -> Tokens | Finished | Failed:
        """Wait for the next event and return it. The last event is the terminal event.

        Raises:
            JobNotFound: The id is wrong, or the job has expired.
            ProtocolError: Events are missing in the event stream.
            RedisError: Redis could not be reached for `OUTAGE_S`.
        """
        while not self._ready:
            if self._is_missing:
                raise JobNotFound(self._job_id)
            if self._is_behind:
                await self._catch_up()
            elif self._inbox:
                await self._apply_live(self._inbox.popleft())
            else:
                self._wake.clear()
                await self._wake.wait()
        return self._ready.popleft()

    def _fall_behind(self) -> None:
        self._is_behind = True
        self._inbox.clear()
        self._wake.set()

    async def _apply_live(self, payload: bytes) -> None:
        try:
            event = codec.decode_event(payload)
        except ProtocolError:  # any client of Redis may publish; only the event stream is trusted
            return self._fall_behind()
        if isinstance(event, Finished | Failed):
            if not await self._is_complete():
                return self._fall_behind()
            self._ready.append(event)
        elif isinstance(event, Tokens):
            if self.position.is_before(event):
                return self._fall_behind()
            self._apply_tokens(event)
        return None

    async def _is_complete(self) -> bool:
        """Return whether all stored tokens were read. No gap shows the loss of a message before the terminal event."""
        try:
            tail: Any = await self._redis.xrevrange(self._events_key, count=TAIL_EVENTS)
        except (RedisError, OSError):
            return False
        events = [codec.decode_event(fields[b"e"]) for _, fields in tail]
        last = next((event for event in events if isinstance(event, Tokens)), None)
        return last is not None and self.position.is_at_end_of(last)

    async def _catch_up(self) -> None:
        """Read one page of the event stream. The reader remains behind if the page was full."""
        self._is_behind = False
        self._inbox.clear()
        if self._must_restart:
            self._must_restart, self._is_full_read, self._cursor = False, True, "-"
        status, entries = await self._read_page()
        if status is None:
            self._is_missing = True
            return
        for entry_id, fields in entries:
            self._cursor = f"({entry_id.decode()}"
            self._apply_stored(codec.decode_event(fields[b"e"]))
        if len(entries) == PAGE_EVENTS:
            self._is_behind = True
            return
        # The status was read before the events, so the events of an ended job include its terminal event.
        if has_ended(status) and not (self._ready and isinstance(self._ready[-1], Finished | Failed)):
            if self._is_full_read:
                raise ProtocolError(f"job {self._job_id} has ended, but its events are missing")
            self.reread()
        self._is_full_read = False

    def _apply_stored(self, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            self._ready.append(event)
        elif isinstance(event, Tokens):
            if self.position.is_before(event):
                raise ProtocolError(f"job {self._job_id} has lost events before token {event.offset}")
            self._apply_tokens(event)

    def _apply_tokens(self, event: Tokens) -> None:
        new = self.position.advance(event)
        if new is not None:
            self._ready.append(new)

    async def _read_page(self) -> tuple[bytes | None, list[tuple[bytes, dict[bytes, bytes]]]]:
        """Return the job's status and then a page of its events. Retries for `OUTAGE_S` if Redis cannot be reached."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + OUTAGE_S
        while True:
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.hget(self.job_key, "status")
                    pipe.xrange(self._events_key, min=self._cursor, count=PAGE_EVENTS)
                    status, entries = await pipe.execute()
            except (RedisError, OSError):
                if loop.time() > deadline_s:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return status, entries


class EndWaiter:
    """Waits until a job has ended, without reading its output."""

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        self.channel, self.job_key, self.last_heard_s = keys.channel, keys.job, 0.0
        self._redis = redis
        self._job_id = job_id
        self._must_read_status = False
        self._has_ended = False
        self._is_missing = False
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EndWaiter {self._job_id} ended={self._has_ended}>"

    def deliver(self, payload: bytes) -> None:
        """Read the job's status if the message is a terminal event."""
        try:
            is_terminal = isinstance(codec.decode_event(payload), Finished | Failed)
        except ProtocolError:
            return
        if is_terminal:
            self.reread()

    def reread(self) -> None:
        """Read the job's status."""
        self._must_read_status = True
        self._wake.set()

    def update_status(self, status: bytes | None, n_stored_tokens: int) -> None:  # noqa: ARG002 - the protocol has it
        """Receive the job's status."""
        self._is_missing = status is None
        self._has_ended = has_ended(status)
        if self._is_missing or self._has_ended:
            self._wake.set()

    async def wait(self) -> None:
        """Return when the job has ended.

        Raises:
            JobNotFound: The id is wrong, or the job has expired.
        """
        while not self._has_ended:
            if self._is_missing:
                raise JobNotFound(self._job_id)
            self._wake.clear()
            if self._must_read_status:
                self._must_read_status = False
                await self._read_status()
            else:
                await self._wake.wait()

    async def _read_status(self) -> None:
        try:
            status: Any = await self._redis.hget(self.job_key, "status")
        except (RedisError, OSError):
            self.last_heard_s = 0.0  # the subscriber polls this job as soon as Redis can be reached
        else:
            self.update_status(status, 0)
