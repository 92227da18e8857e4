"""The command `llamaq metrics`: serves the metrics of all queues and workers for Prometheus."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import FrameType
from typing import Annotated

import typer
from redis.exceptions import RedisError

from llamaq.cli.common_options import OfLogFormat, OnlyQueues, RedisUrl
from llamaq.common.logging_setup import LogFormat, configure_logging
from llamaq.common.metrics.metric_definitions import Samples
from llamaq.common.metrics.optional_server import server_class
from llamaq.common.redis.url import read_url
from llamaq.common.settings import ClientSettings, client_settings
from llamaq.producer.queries.metrics import MetricsReader
from llamaq.producer.queue_connection import QueueConnection

DEFAULT_PORT = 9540
READ_TIMEOUT_S = 8.0
"""Longest time that one scrape reads from Redis. Prometheus waits 10 s for an answer by default."""
PING_TIMEOUT_S = 2.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("metrics")(serve_metrics)


def serve_metrics(
    redis_url: RedisUrl = None,
    queue: OnlyQueues = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to listen on. 0: any free port.")
    ] = DEFAULT_PORT,
    bind: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0: all IPv4 addresses.")] = "127.0.0.1",
    log_format: OfLogFormat = LogFormat.TEXT,
) -> None:
    """Serve the metrics of all queues and workers for Prometheus, at /metrics. /health tells whether Redis answers."""
    settings = client_settings(redis_url=redis_url)
    read_url(settings.redis_url)  # raises if it is not valid
    configure_logging("info", log_format)
    reader = MetricsReader(queue or ())
    server = server_class("llamaq metrics")(
        lambda: read_metrics(settings, reader), lambda: is_redis_up(settings), port=port, bind=bind
    )
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with server:
        stopped.wait()


def read_metrics(settings: ClientSettings, reader: MetricsReader) -> Samples:
    """Return the metrics of all queues. Each scrape opens new connections, so no scrape uses a connection that an
    outage broke.
    """

    async def read() -> Samples:
        connection = QueueConnection(settings)
        try:
            return await reader.read(connection, READ_TIMEOUT_S)
        finally:
            await connection.aclose()

    return asyncio.run(read())


def is_redis_up(settings: ClientSettings) -> bool:
    """Return whether Redis answers."""

    async def ping() -> bool:
        connection = QueueConnection(settings)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                return bool(await connection.redis.ping())
        except (RedisError, TimeoutError):
            return False
        finally:
            await connection.aclose()

    return asyncio.run(ping())
