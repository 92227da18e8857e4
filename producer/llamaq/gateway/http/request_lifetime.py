"""Bounds the size and the time of a request body, and cancels the work of a request when its client disconnects."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamaq.common.background_tasks import cancel_tasks
from llamaq.gateway.http.errors import RequestRefused, error_response
from llamaq.gateway.http.open_requests import OpenRequests, SentResponse

DISCARD_S = 1.0
"""How long the rest of a body that is too large is read before the response. A client that still sends would get a
reset connection instead of the response."""

UPLOADS = frozenset({("POST", "/v1/files")})
"""Requests whose endpoint reads the body while it arrives, with separate limits."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class RestMissing(Exception):
    """The rest of a response that has begun cannot be sent. The server closes the connection, so the client notices."""


class RequestLifetime:
    """Middleware. It reads the body within its limits, then cancels the application when the client disconnects.

    The application is cancelled at any point, even before it has sent anything. So only its `finally` clauses end the
    jobs of a client that has disconnected.
    """

    def __init__(self, app: ASGIApp, open_requests: OpenRequests, max_body_bytes: int, body_timeout_s: float) -> None:
        self.app = app
        self.open_requests = open_requests
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = SentResponse(send)
        async with self.open_requests.handling(scope, receive, response):
            await self._handle(scope, receive, response)

    async def _handle(self, scope: Scope, receive: Receive, response: SentResponse) -> None:
        if (scope["method"], scope["path"]) in UPLOADS:
            await self.app(scope, receive, response)
            return
        try:
            body = await self._read_body(scope, receive)
        except ClientGone:
            return
        except RequestRefused as exc:
            await error_response(exc, scope)(scope, receive, response)
            return
        try:
            await _run_until_disconnect(self.app, scope, body, receive, response)
        except* RestMissing:  # starlette 0.45 raises the exception of a streamed body in a group
            pass

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        headers = Headers(scope=scope)
        is_too_large = self._is_too_large(headers.get("content-length", ""))
        if is_too_large and "expect" in headers:  # the client sends the body only after it is told to
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(DISCARD_S if is_too_large else self.body_timeout_s) as limit:
                is_complete = False
                while not is_complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    is_complete = not message.get("more_body", False)
                    if is_too_large:
                        continue
                    body += message.get("body", b"")
                    if len(body) > self.max_body_bytes:
                        is_too_large = True
                        limit.reschedule(asyncio.get_running_loop().time() + DISCARD_S)
        except TimeoutError as exc:
            if not is_too_large:
                raise self._too_slow() from exc
        if is_too_large:
            raise self._too_large()
        return bytes(body)

    def _is_too_large(self, announced: str) -> bool:
        # h11 has checked the header: it has at most 20 digits.
        return announced.isdecimal() and int(announced) > self.max_body_bytes

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has more than {self.max_body_bytes} bytes (--max-body-bytes)",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def _too_slow(self) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body was not complete within {self.body_timeout_s:g} s (--body-timeout-s)",
            code="body_timeout",
            headers={"Connection": "close"},
        )


async def _run_until_disconnect(
    app: ASGIApp, scope: Scope, body: bytes, receive: Receive, response: SentResponse
) -> None:
    """Run the application. If the client disconnects before the response is complete, cancel the application."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # the application is cancelled when the client disconnects
        raise AssertionError

    working = asyncio.ensure_future(app(scope, replay, response))
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not response.is_complete and not working.done():
            working.cancel()
        await asyncio.wait([working])
    finally:
        await cancel_tasks(working, leaving)
    if not working.cancelled():
        working.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
