"""The two listeners: one that reads all of a job's tokens, and one that waits for its end."""

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
"""A reader slower than this many messages drops them and reads the stream instead."""
PAGE_EVENTS = 512
OUTAGE_S = 60.0
"""How long a reader goes on trying while Redis cannot be reached."""
RETRY_S = 0.2
TAIL_EVENTS = 4

_ENDED = {JobState.FINISHED.value.encode(), JobState.FAILED.value.encode()}


def has_ended(status: bytes | None) -> bool:
    """Whether this `status` field of a job's hash is its last one."""
    return status in _ENDED


class Position:
    """How far a text and its tokens have been seen. Makes sure of no gap and no repeat."""

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0

    def is_before(self, event: Tokens) -> bool:
        """Whether something is missing between here and the event."""
        return event.offset > self.tokens or event.text_offset > self.chars

    def is_at_end_of(self, event: Tokens) -> bool:
        """Whether the event has nothing new."""
        return event.offset + len(event.tokens) <= self.tokens and event.text_offset + len(event.text) <= self.chars

    def advance(self, event: Tokens) -> Tokens | None:
        """What is new in the event, which must not lie behind a gap; None for nothing."""
        if self.is_at_end_of(event):
            return None
        tokens, text = event.tokens[self.tokens - event.offset :], event.text[self.chars - event.text_offset :]
        new = Tokens(offset=self.tokens, tokens=tokens, text_offset=self.chars, text=text)
        self.tokens += len(tokens)
        self.chars += len(text)
        return new


class EventReader:
    """What a job generates, from its first token, in order and once each, and how it ends."""

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        self.channel, self.job_key, self.heard = keys.channel, keys.job, 0.0
        self.position = Position()
        self._redis = redis
        self._events_key = keys.events
        self._job_id = job_id
        self._inbox: deque[bytes] = deque()
        self._ready: deque[Tokens | Finished | Failed] = deque()
        self._cursor = "-"
        self._must_restart = True
        self._is_whole_pass = False
        self._is_behind = False
        self._is_gone = False
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        state = "gone" if self._is_gone else "behind" if self._is_behind else "live"
        return f"<EventReader {self._job_id} {state} tokens={self.position.tokens} inbox={len(self._inbox)}>"

    def deliver(self, payload: bytes) -> None:
        """Queue a message; it lies in the stream as well, so none is kept while that has to be read."""
        if self._is_behind:
            return
        if len(self._inbox) >= INBOX_MESSAGES:
            self._fall_behind()
        else:
            self._inbox.append(payload)
            self._wake.set()

    def look_again(self) -> None:
        """Read the stream from its beginning: after a rollback of Redis its ids may start over."""
        self._must_restart = True
        self._fall_behind()

    def inform(self, status: bytes | None, generated: int) -> None:
        """Read the stream if the job is ahead of what was seen."""
        if status is None:
            self._is_gone = True
            self._wake.set()
        elif has_ended(status) or generated > self.position.tokens:
            self._fall_behind()

    async def next_event(self) -> Tokens | Finished | Failed:
        """The next new tokens, or the end, which is the last. Raises `JobNotFound`."""
        while not self._ready:
            if self._is_gone:
                raise JobNotFound(self._job_id)
            if self._is_behind:
                await self._catch_up()
            elif self._inbox:
                await self._take_live(self._inbox.popleft())
            else:
                self._wake.clear()
                await self._wake.wait()
        return self._ready.popleft()

    def _fall_behind(self) -> None:
        self._is_behind = True
        self._inbox.clear()
        self._wake.set()

    async def _take_live(self, payload: bytes) -> None:
        try:
            event = codec.decode_event(payload)
        except ProtocolError:  # anyone may publish; the stream decides
            return self._fall_behind()
        if isinstance(event, Finished | Failed):
            if not await self._is_complete():
                return self._fall_behind()
            self._ready.append(event)
        elif isinstance(event, Tokens):
            if self.position.is_before(event):
                return self._fall_behind()
            self._take_tokens(event)
        return None

    async def _is_complete(self) -> bool:
        """Whether the stream's last tokens have been seen: a lost message right before the end leaves no gap."""
        try:
            tail: Any = await self._redis.xrevrange(self._events_key, count=TAIL_EVENTS)
        except (RedisError, OSError):
            return False
        events = [codec.decode_event(fields[b"e"]) for _, fields in tail]
        last = next((event for event in events if isinstance(event, Tokens)), None)
        return last is not None and self.position.is_at_end_of(last)

    async def _catch_up(self) -> None:
        """Read one page of the stream; stay behind when it was full."""
        self._is_behind = False
        self._inbox.clear()
        if self._must_restart:
            self._must_restart, self._is_whole_pass, self._cursor = False, True, "-"
        status, entries = await self._read_page()
        if status is None:
            self._is_gone = True
            return
        for entry_id, fields in entries:
            self._cursor = f"({entry_id.decode()}"
            self._take_stored(codec.decode_event(fields[b"e"]))
        if len(entries) == PAGE_EVENTS:
            self._is_behind = True
            return
        # The status was read before the events, so the events of an ended job hold its end.
        if has_ended(status) and not (self._ready and isinstance(self._ready[-1], Finished | Failed)):
            if self._is_whole_pass:
                raise ProtocolError(f"job {self._job_id} has ended, but its events are missing")
            self.look_again()
        self._is_whole_pass = False

    def _take_stored(self, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            self._ready.append(event)
        elif isinstance(event, Tokens):
            if self.position.is_before(event):
                raise ProtocolError(f"job {self._job_id} has lost events before token {event.offset}")
            self._take_tokens(event)

    def _take_tokens(self, event: Tokens) -> None:
        new = self.position.advance(event)
        if new is not None:
            self._ready.append(new)

    async def _read_page(self) -> tuple[bytes | None, list[tuple[bytes, dict[bytes, bytes]]]]:
        """The job's status, and after that a page of its events; tries again while Redis is away."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OUTAGE_S
        while True:
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.hget(self.job_key, "status")
                    pipe.xrange(self._events_key, min=self._cursor, count=PAGE_EVENTS)
                    status, entries = await pipe.execute()
            except (RedisError, OSError):
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return status, entries


class EndWaiter:
    """Waits until one job has ended, without reading what it generated."""

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        self.channel, self.job_key, self.heard = keys.channel, keys.job, 0.0
        self._redis = redis
        self._job_id = job_id
        self._must_look = False
        self._has_ended = False
        self._is_gone = False
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EndWaiter {self._job_id} ended={self._has_ended}>"

    def deliver(self, payload: bytes) -> None:
        """Look at the job when this may be its end."""
        try:
            is_end = isinstance(codec.decode_event(payload), Finished | Failed)
        except ProtocolError:
            return
        if is_end:
            self.look_again()

    def look_again(self) -> None:
        """Read the job's status."""
        self._must_look = True
        self._wake.set()

    def inform(self, status: bytes | None, generated: int) -> None:  # noqa: ARG002 - as the protocol has it
        """Take the job's status."""
        self._is_gone = status is None
        self._has_ended = has_ended(status)
        if self._is_gone or self._has_ended:
            self._wake.set()

    async def wait(self) -> None:
        """Return when the job has ended. Raises `JobNotFound`."""
        while not self._has_ended:
            if self._is_gone:
                raise JobNotFound(self._job_id)
            self._wake.clear()
            if self._must_look:
                self._must_look = False
                await self._look()
            else:
                await self._wake.wait()

    async def _look(self) -> None:
        try:
            status: Any = await self._redis.hget(self.job_key, "status")
        except (RedisError, OSError):
            self.heard = 0.0  # the subscriber looks as soon as Redis is back
        else:
            self.inform(status, 0)
