"""How much of a response the server has sent."""

from __future__ import annotations

from starlette.types import Message, Send


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
