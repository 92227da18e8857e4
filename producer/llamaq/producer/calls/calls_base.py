"""What all calls of the asyncio client share: its connection to one queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from llamaq.common.protocol.chat import Message
from llamaq.common.settings import ClientSettings
from llamaq.producer.auto_cancelled_jobs import AutoCancelledJobs
from llamaq.producer.queue_connection import QueueConnection

Messages = Sequence[Message | Mapping[str, Any]]
"""A chat, as `Message` objects or as mappings such as `{"role": "user", "content": "hi"}`.

A content may also be a list of parts such as `{"type": "text", "text": "hi"}`.
"""


class ClientCalls:
    """Base of the classes of calls. It connects to Redis at the first call.

    Args:
        settings: The settings of the client.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.queue = settings.queue
        self.connection = QueueConnection(settings)
        self.keys = self.connection.keys
        self.auto_cancelled = AutoCancelledJobs(self.connection)

    @property
    def redis(self) -> Redis:
        """The connections to Redis, for commands of your own."""
        return self.connection.redis
