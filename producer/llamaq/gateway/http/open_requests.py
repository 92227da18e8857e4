"""Notes how much of a response is sent. Answers the requests that a defect or the stop of the server has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaq.gateway.http.errors import RequestRefused, error_response

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Longest time to send the answer. A client that does not read would otherwise delay the end of the server."""
FORMAT_ERROR = "format_error"
"""Name of the function, in the state of a request, that returns the event for an error of its stream."""


class SentResponse:
    """Sends the messages of a response, and notes how much of it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.is_complete = False

    def __repr__(self) -> str:
        return f"<SentResponse has_begun={self.has_begun} is_complete={self.is_complete}>"

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        self.has_begun = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True  # before the send: afterwards `receive` tells of a disconnect
        await self._send(message)


class Defects:
    """Middleware that answers a request when its endpoint raises an exception that it should not raise.

    Starlette also answers it, but outside of all other middleware: without the id of the request, and without the
    headers that let a web page of another origin read the answer. The exception is raised again, so it is logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = SentResponse(send)
        try:
            await self.app(scope, receive, response)
        except Exception as exc:
            if not response.has_begun:
                await error_response(exc, scope)(scope, receive, response)
            raise


class OpenRequests:
    """The requests that a server handles now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._are_ended = False

    def __repr__(self) -> str:
        return f"<OpenRequests {len(self._tasks)}>"

    def end_all(self) -> None:
        """End all requests. Clients get the status 503, or an error event if their stream has begun."""
        self._are_ended = True
        if self._tasks:
            log.warning("http.requests_ended count=%d", len(self._tasks))
        for task in self._tasks:
            task.cancel()

    @asynccontextmanager
    async def handling(self, scope: Scope, receive: Receive, response: SentResponse) -> AsyncIterator[None]:
        """Count a request as open. If `end_all` cancels the body of this context, answer the request."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._are_ended:
                raise
            task.uncancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await _answer(scope, receive, response)
        finally:
            self._tasks.discard(task)


async def _answer(scope: Scope, receive: Receive, response: SentResponse) -> None:
    """Send the error, in the form of the API of the request. A response that is not a stream is left incomplete."""
    if response.is_complete:
        return
    error = RequestRefused(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the server is stopping; try again",
        code="server_stopping",
        headers={"Retry-After": "1"},
    )
    if not response.has_begun:
        await error_response(error, scope)(scope, receive, response)
    elif format_error := scope.get("state", {}).get(FORMAT_ERROR):
        await response({"type": "http.response.body", "body": format_error(error), "more_body": False})
