"""`EventReader` reads all tokens of a job and its end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from redis.asyncio import Redis

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Event, Failed, Finished, PromptProgress, Retried, TokenSpan
from llamaq.common.protocol.keys import JobKeys
from llamaq.producer.call_timeout import timeout_error
from llamaq.producer.streaming.job_end import END_FIELDS, decode_end, decode_output, has_ended
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.job_state import STATE_FIELDS, StoredState, read_state
from llamaq.producer.streaming.output_position import OutputPosition

INBOX_EVENTS = 256
"""Largest number of live events that are queued for a slow reader. When one more arrives, the reader drops it and reads
the event stream instead."""
PAGE_EVENTS = 512
"""Largest number of events that one read of the event stream returns."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What one read of a job returned."""

    state: StoredState
    end: Finished | Failed | None
    """How the job ended. None: it has not ended."""
    output: TokenSpan | None
    """The whole output. None: the job has not ended, or its events are the only record of the output."""
    entries: list[tuple[bytes, dict[bytes, bytes]]]
    """The next page of the event stream."""


class EventReader(JobListener):
    """Reads a job's output from its first token on, in order, without gap or repeat, and its terminal event.

    The reader applies live messages that continue its position. After a message may have been lost, the reader is
    "behind": it drops all live messages until it has read the event stream to the end. When the job has ended, the
    reader takes the rest from the stored output.
    """

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        super().__init__(redis, keys, job_id)
        self.position = OutputPosition()
        self._ready: deque[TokenSpan | PromptProgress | Finished | Failed] = deque()
        """Events for the caller."""
        self._held: deque[bytes] = deque()
        """Live messages that arrived during a read of the event stream."""
        self._cursor = "-"
        """Start of the next page of the event stream, as an argument of XRANGE."""
        self._must_restart = True
        """Whether the next page is the first one of the event stream."""
        self._is_full_read = False
        """Whether the current read of the event stream started at the beginning of the stream."""
        self._is_behind = False
        self._is_paging = False
        """Whether a page of the event stream is being read."""
        self._progress: PromptProgress | None = None
        """The last progress of the prompt. A worker that repeats a flush publishes it again."""
        self._has_ended = False
        """Whether the terminal event was passed to the caller."""

    def __repr__(self) -> str:
        state = "missing" if self._is_missing else "behind" if self._is_behind else "live"
        return f"<EventReader {self.job_id} {state} tokens={self.position.tokens} ready={len(self._ready)}>"

    @property
    def is_receiving(self) -> bool:
        """Whether the job has sent tokens. A job that has sent none may wait for a slot, or may not stream."""
        return self.position.tokens > 0

    def deliver(self, payload: bytes) -> None:
        """Apply a live message. While the reader is behind, messages are dropped: the event stream has them too.

        It does not have the progress of the prompt, which is therefore applied also while the reader is behind.
        """
        if self._has_ended:
            return
        if self._is_behind or self._is_paging:
            self._deliver_while_reading(payload)
        elif len(self._ready) >= INBOX_EVENTS:
            self._fall_behind()
        else:
            self._apply_live(payload)

    def _deliver_while_reading(self, payload: bytes) -> None:
        """Apply or hold a live message that came during a read of the event stream, or before one."""
        if codec.is_prompt_progress(payload):
            if len(self._ready) < INBOX_EVENTS:
                self._apply_live(payload)
        elif self._is_paging and not self._is_behind:
            self._held.append(payload)
            if len(self._held) > INBOX_EVENTS:
                self._fall_behind()

    def reread(self) -> None:
        """Read the event stream from its beginning, because a failover of Redis may reset the stream's entry ids."""
        self._must_restart = True
        self._fall_behind()

    def update_state(self, state: StoredState) -> None:
        """Read the event stream if the job has ended or has more tokens than were read."""
        self.on_deadline(state.due_ms)
        if state.status is None:
            self._is_missing = True
            self._wait.wake()
        elif has_ended(state.status) or state.n_tokens > self.position.tokens:
            self._fall_behind()

    async def next_event(self, timeout_s: float) -> TokenSpan | PromptProgress | Finished | Failed:
        """Wait for the next event and return it. The last event is the terminal event.

        Raises:
            ResultTimeout: No event came within `timeout_s` seconds.
            JobNotFound: The id is wrong, or the job has expired.
            ProtocolError: Output of the job is missing in Redis.
            RedisError: Redis refuses to read the job.
        """
        if not self._ready:
            deadline_s = asyncio.get_running_loop().time() + timeout_s
            while not self._ready:
                if self._is_behind:
                    self._start_reading()
                try:
                    await self._wait_until(deadline_s)
                except TimeoutError as exc:
                    raise timeout_error(self.job_id, "has sent no chunk", timeout_s, self.redis_error) from exc
        return self._ready.popleft()

    def _fall_behind(self) -> None:
        if not self._has_ended:
            self._is_behind = True
            self._held.clear()
            self._wait.wake()

    def _apply_live(self, payload: bytes) -> None:
        try:
            event = codec.decode_streamed(payload)
        except ProtocolError:  # any client of Redis may publish; only the event stream is trusted
            self._fall_behind()
            return
        match event:
            case TokenSpan() if not self.position.is_before(event):
                self._put(event)
                self._wait.wake()
            case Finished() | Failed() if self._has_all_output(event):
                self._end(event)
                self._wait.wake()
            case PromptProgress() if event != self._progress:
                self._progress = event
                self._ready.append(event)
                self._wait.wake()
            case TokenSpan() | Finished() | Failed():  # output before it is missing
                self._fall_behind()
            case Retried():  # reads the time at which the job is due again: `expire` adds its entry then
                self._fall_behind()

    def _has_all_output(self, end: Finished | Failed) -> bool:
        """Return whether all output was read. The offsets do not show this: a message that was lost just before the
        terminal event leaves no gap.
        """
        if isinstance(end, Failed) or end.text_length is None:
            return False
        return (self.position.tokens, self.position.chars) == (end.stats.generated_tokens, end.text_length)

    def _put(self, span: TokenSpan) -> None:
        new = self.position.advance(span)
        if new is not None:
            self._ready.append(new)

    async def _read(self) -> None:
        while self._is_behind and not self._ready:
            await self._read_page()

    async def _read_page(self) -> None:
        """Read one page of the event stream. The reader remains behind if the page was full."""
        self._is_behind, self._is_paging = False, True
        self._held.clear()
        if self._must_restart:
            self._must_restart, self._is_full_read, self._cursor = False, True, "-"
        try:
            stored = await self._reads.read(self._fetch_page)
        except BaseException:
            self._is_behind = True
            raise
        finally:
            self._is_paging = False
        self.on_deadline(stored.state.due_ms)
        if stored.state.status is None:
            self._is_missing = True
        elif stored.end is not None and stored.output is not None:
            self._put(stored.output)
            self._end(stored.end)
        else:
            self._apply_page(stored)
            while self._held and not self._is_behind:
                self._apply_live(self._held.popleft())

    async def _fetch_page(self) -> StoredJob:
        """Return the job's end and then a page of its events."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(self.keys.job, *STATE_FIELDS)
            pipe.hmget(self.keys.job, *END_FIELDS, "output")
            pipe.xrange(self.keys.events, min=self._cursor, count=PAGE_EVENTS)
            state, (*end, output), entries = await pipe.execute()
        return StoredJob(
            read_state(state), decode_end(end), None if output is None else await decode_output(output), entries
        )

    def _apply_page(self, stored: StoredJob) -> None:
        """Apply a page of the event stream, and the end of the job if this was the last page."""
        for entry_id, fields in stored.entries:
            self._cursor = f"({entry_id.decode()}"
            if not self._apply_stored(codec.decode_streamed(fields.get(b"e", b"")), stored.end):
                break
        else:
            if len(stored.entries) == PAGE_EVENTS:
                self._is_behind = True
                return
        if stored.end is not None:
            if self.position.tokens < stored.state.n_tokens and not self._is_full_read:
                self.reread()
                return
            if self.position.tokens < stored.state.n_tokens and isinstance(stored.end, Finished):
                raise ProtocolError(f"job {self.job_id} has finished, but its output and its events are missing")
            self._end(stored.end)
        self._is_full_read = False

    def _apply_stored(self, event: Event | TokenSpan, end: Finished | Failed | None) -> bool:
        """Apply a stored event. Returns False if output before it is missing, which a failed job may have lost."""
        if isinstance(event, TokenSpan):
            if self.position.is_before(event):
                if isinstance(end, Failed):
                    return False
                raise ProtocolError(f"job {self.job_id} has lost events before token {event.offset}")
            self._put(event)
        return True

    def _end(self, end: Finished | Failed) -> None:
        self._has_ended, self._is_behind = True, False
        self._ready.append(end)
