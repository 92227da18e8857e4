"""Reads the body of an upload, which is too large for the memory, while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from http import HTTPStatus

from starlette.types import Receive

from llamaq.gateway.files.store import UPLOAD_S
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http.request_lifetime import DISCARD_S, ClientGone


class UploadBody:
    """The body of one request.

    An upload may take a long time, but it fails if no byte arrives for some time.
    """

    def __init__(self, receive: Receive, *, silence_s: float) -> None:
        """Begin to read.

        Args:
            receive: The function of ASGI.
            silence_s: Longest time without a byte, in seconds.
        """
        self._receive = receive
        self._silence_s = silence_s
        self._has_ended = False
        self.has_begun = False
        """Whether any of it was read. A client that waits for `100 Continue` has got it then, and sends the body."""

    def __repr__(self) -> str:
        return f"<UploadBody ended={self._has_ended}>"

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive.

        Raises:
            RequestRefused: They arrive too slowly.
            ClientGone: The client has closed the connection.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + UPLOAD_S
        while not self._has_ended:
            try:
                async with asyncio.timeout_at(min(loop.time() + self._silence_s, end_s)):
                    data = await self._next()
            except TimeoutError as exc:
                raise RequestRefused(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"no byte of the body has arrived for {self._silence_s:g} s (--body-timeout-s), or the upload has "
                    f"taken longer than {UPLOAD_S} s",
                    code="body_timeout",
                    headers={"Connection": "close"},
                ) from exc
            yield data

    async def _next(self) -> bytes:
        self.has_begun = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._has_ended = True
            raise ClientGone
        self._has_ended = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def discard(self) -> None:
        """Read more of the body for a moment before an error is sent. A client that still sends would not receive the
        error.
        """
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_S):
                while not self._has_ended:
                    await self._next()
