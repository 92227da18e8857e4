"""Writes server-sent events. No other module knows their format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Self

from pydantic_core import to_json
from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import LlamaqError
from llamaq.gateway.http.errors import error_fields
from llamaq.gateway.http.open_requests import FORMAT_ERROR

FIRST_PING_S = 1.0
"""If a stream has no event within this time, it begins with a comment. Before that, an error can still have a
status."""

COMMENT_TIMEOUT_S = 1.0
"""A comment waits no longer for its text, which needs Redis. So a stream sends comments in time even if Redis does not
answer."""

EVENTS_IN_A_ROW = 4
"""A stream with many waiting events lets other tasks run after this number. Otherwise a long text would delay all other
streams, and asyncio would log a warning for each event that is written to a connection which the client has reset."""

Events = AsyncGenerator[bytes, None]
Comment = Callable[[], Awaitable[str]]

DONE = b"data: [DONE]\n\n"


UNICODE_LINE_BREAKS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]
"""Characters at which some clients divide lines, such as `httpx.Response.iter_lines`, and their escapes in JSON."""


def _encode(value: Any) -> bytes:
    encoded = to_json(value)
    for char, escape in UNICODE_LINE_BREAKS:
        encoded = encoded.replace(char, escape)
    return encoded


def data(value: Any) -> bytes:
    """Return an event without a name, whose data are a value as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named(name: str, value: Any) -> bytes:
    """Return an event with a name, whose data are a value as JSON."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


PLACEHOLDER = "\x00"
"""Stands for the text of a `TextEvent`. No key of an event equals it."""


class TextEvent:
    """An event that is sent again and again with other texts. All but the text is encoded once.

    The encoded event is split at a placeholder; `encode` writes a text in its place.

    Args:
        value: The data of the event with `PLACEHOLDER` as its text. In the encoded event, this text comes after all
            other texts.
    """

    def __init__(self, value: Any) -> None:
        self._before, _, self._after = data(value).rpartition(to_json(PLACEHOLDER))

    def __repr__(self) -> str:
        return f"<TextEvent {self._before!r} {self._after!r}>"

    def encode(self, text: str) -> bytes:
        """Return the event with a text."""
        return b"".join((self._before, _encode(text), self._after))


def comment_line(text: str) -> bytes:
    """Return a comment, which every client of events ignores."""
    return b": " + text.encode(errors="replace").replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n"


def error_event(exc: Exception) -> bytes:
    """Return the event for an error after the first event, as OpenAI's and llama-server's clients read it."""
    return data({"error": error_fields(exc)})


class EventStream(Response):
    """A response of server-sent events. At any end of the response, the generator of its events is closed.

    While there is no event, it sends comments, so that no proxy closes the connection as dead.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        first: asyncio.Task[bytes],
        *,
        comment: Comment,
        ping_s: float,
        format_error: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._comment = comment
        self._ping_s = ping_s
        self._format_error = format_error
        self._sent_s = 0.0
        """Event-loop time of the last message."""

    @classmethod
    async def open(
        cls,
        events: Events,
        *,
        comment: Comment,
        ping_s: float,
        format_error: Callable[[Exception], bytes] = error_event,
    ) -> Self:
        """Return the response when the first event has arrived, or when the first comment is due.

        Args:
            events: The encoded events.
            comment: Returns what a comment says.
            ping_s: Seconds of silence after which a comment is sent.
            format_error: Returns the event for an error of `events` after the first event.

        Raises:
            Exception: The error of the first event. The generator is closed.
        """
        first = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait([first], timeout=min(FIRST_PING_S, ping_s))
            if first.done() and not isinstance(first.exception(), StopAsyncIteration):  # no event at all is no error
                first.result()
        except BaseException:
            await _close(events, first)
            raise
        return cls(events, first, comment=comment, ping_s=ping_s, format_error=format_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # the form of ASGI
        """Send the response."""
        pinging: asyncio.Task[None] | None = None
        scope.setdefault("state", {})[FORMAT_ERROR] = self._format_error
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pinging = asyncio.create_task(self._ping(send, is_waiting=not self._first.done()))
            # A separate task, because otherwise each event would resume the coroutines of all middleware.
            await asyncio.create_task(self._send_events(send))
            await cancel_tasks(pinging)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if pinging is not None:
                pinging.cancel()
            await _close(self._events, self._first)

    async def _send_events(self, send: Send) -> None:
        loop, n_events = asyncio.get_running_loop(), 1
        try:
            await send({"type": "http.response.body", "body": await self._first, "more_body": True})
            async for event in self._events:
                self._sent_s = loop.time()
                await send({"type": "http.response.body", "body": event, "more_body": True})
                n_events += 1
                if n_events % EVENTS_IN_A_ROW == 0:
                    await asyncio.sleep(0)
        except (LlamaqError, RedisError, OSError) as exc:
            await send({"type": "http.response.body", "body": self._format_error(exc), "more_body": True})
        except StopAsyncIteration:  # there was no event at all
            pass

    async def _ping(self, send: Send, *, is_waiting: bool) -> None:
        """Send comments while there is no event. The first comment is sent soon, or at once if there was no event
        yet.
        """
        loop = asyncio.get_running_loop()
        self._sent_s = self._sent_s or loop.time()
        limit_s = 0.0 if is_waiting else min(FIRST_PING_S, self._ping_s)
        while True:
            silent_s = loop.time() - self._sent_s
            if silent_s < limit_s:
                await asyncio.sleep(limit_s - silent_s)
                continue
            limit_s = self._ping_s
            text = "waiting"
            with suppress(LlamaqError, RedisError, OSError):  # TimeoutError is a subclass
                async with asyncio.timeout(COMMENT_TIMEOUT_S):
                    text = await self._comment()
            self._sent_s = loop.time()
            await send({"type": "http.response.body", "body": comment_line(text), "more_body": True})


async def _close(events: Events, first: asyncio.Task[bytes]) -> None:
    await cancel_tasks(first)
    async with aclosing(events):
        pass
