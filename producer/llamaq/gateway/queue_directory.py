"""Lists the queues and the workers that serve them, and finds the queue that a request means by its `model`."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.background_tasks import BackgroundTasks, cancel_tasks, drop_error
from llamaq.common.errors import LlamaqError, NoWorker
from llamaq.common.protocol.queue_and_worker_state import QueueDepth, WorkerCard
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.settings import ClientSettings
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.model_names import NamedModel, Served, allowed_by, find_named
from llamaq.gateway.settings import ServeSettings
from llamaq.producer import AsyncClient
from llamaq.producer.queries.damaged_queues import DamagedQueues
from llamaq.producer.queries.metrics import read_job_counters
from llamaq.producer.queries.queue_snapshots import read_workers

FRESH_S = 2.0
"""A request waits for a read of the workers if the last one is older."""
REFRESH_S = 1.0
"""Interval at which the workers are read in the background while requests arrive."""
USED_S = 60.0
"""The workers are read in the background until no request has come for this time."""
FORGOTTEN_S = 7 * 24 * 3600.0
"""A queue is forgotten when no worker has sent a heartbeat for this time."""


class QueueDirectory:
    """The queues that this server can reach, with one client for each.

    It belongs to one event loop. While requests come, it reads the workers in the background. So only a request after a
    long pause waits for a read.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._clients: dict[tuple[str, bool], AsyncClient] = {}
        self._guessed: set[AsyncClient] = set()
        """Clients that were created before a worker of their queue has stored its number of partitions."""
        self._replaced: dict[AsyncClient, tuple[str, bool]] = {}
        """Clients with another number of partitions than the workers have now. Jobs in flight may still use them."""
        self._default = self._new_client(settings.queue, settings.partitions)
        self._served: Served = {}
        """The known queues and their live workers."""
        self._last_served: Served = {}
        """The known queues and their live workers, or if a queue has none, the last ones that this server saw."""
        self._damaged_lists, self._damaged_settings = DamagedQueues(), DamagedQueues()
        """Queues whose list of workers, or whose settings, other clients of Redis have overwritten."""
        self._last_cards: dict[str, WorkerCard] = {}
        """The last cards of the queues that requests have named so far."""
        self._read_s = float("-inf")
        self._asked_s = 0.0
        """When a request has asked for the workers."""
        self._reading: asyncio.Task[None] | None = None
        self._refreshing = BackgroundTasks()
        """The task that reads the workers repeatedly. There is no task while no requests arrive."""

    def __repr__(self) -> str:
        return f"<QueueDirectory { {name: len(workers) for name, workers in self._served.items()} }>"

    @property
    def default(self) -> AsyncClient:
        """A client for calls that do not depend on the queue."""
        return self._default

    async def aclose(self) -> None:
        """Close all clients. The jobs of open streams are cancelled."""
        await self._refreshing.cancel()
        if self._reading is not None:  # the read outlives its callers, and would connect again after the close
            await cancel_tasks(self._reading)
        await asyncio.gather(*(client.aclose() for client in {self._default, *self._clients.values(), *self._replaced}))

    async def served(self, *, is_fresh: bool = False) -> Served:
        """Return the known queues with their live workers. A queue may have none.

        Args:
            is_fresh: Whether the last heartbeats are wanted. Otherwise they may be `FRESH_S` older.

        Raises:
            RedisError: Redis cannot be read.
        """
        self._asked_s = time.monotonic()
        if is_fresh or self._asked_s - self._read_s >= FRESH_S:
            await self._read_once()
        if not self._refreshing:
            self._refreshing.start(self._refresh())
        return self._served

    async def _refresh(self) -> None:
        """Read the workers at intervals, until requests stop arriving or Redis cannot be read."""
        with suppress(LlamaqError, RedisError, OSError):  # the next request reads too, and raises the error
            while time.monotonic() - self._asked_s < USED_S:
                await asyncio.sleep(REFRESH_S)
                await self._read_once()

    async def _read_once(self) -> None:
        """Wait until the workers were read. Calls at the same time share one read."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._forget_reading)
        await asyncio.shield(self._reading)

    def _forget_reading(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        drop_error(task)

    async def _read(self) -> None:
        redis, keys = self._default.redis, self._default.keys
        earliest_ms = (time.time() - FORGOTTEN_S) * 1000
        members: Any = await redis.zrangebyscore(keys.queues(), earliest_ms, "+inf")
        names = sorted({member.decode(errors="replace") for member in members})
        found = await asyncio.gather(
            *(self._damaged_lists.read(name, read_workers(self._default.connection, name)) for name in names)
        )
        await asyncio.gather(*(self._check_partitions(*used) for used in list(self._clients)))
        self._served = {name: workers or () for name, workers in zip(names, found, strict=True)}
        self._last_served = {name: live or self._last_served.get(name, ()) for name, live in self._served.items()}
        self._read_s = time.monotonic()

    async def find(self, model: str | None, key: KeyRecord | None = None) -> NamedModel:
        """Return what the `model` of a request names.

        Models and adapters are searched in the queues that the API key allows. A queue that the request names itself,
        and the server's own, are found in any case. While the workers of a queue restart, the queue has the model and
        the adapters that this server saw last.

        Args:
            model: The `model` of the request. None: it has none.
            key: The API key of the request. None: the server requires none.

        Raises:
            RequestRefused: It names nothing: 404.
        """
        default = self.settings.queue
        for is_fresh in (False, True):  # a worker may have started since the last read
            served = await self.served(is_fresh=is_fresh)
            if named := find_named(model, default, allowed_by(key, served)):
                return named
        if named := find_named(model, default, allowed_by(key, self._last_served)):
            return named
        if model is not None and model in served:
            return NamedModel(model)
        if self.settings.accept_any_model:
            return NamedModel(default)
        raise RequestRefused(
            HTTPStatus.NOT_FOUND,
            f"model: there is no model {str(model)[:100]!r}; GET /v1/models lists the models",
            code="model_not_found",
            param="model",
        )

    async def find_allowed(self, model: str | None, key: KeyRecord | None) -> NamedModel:
        """Return what the `model` of a request names, if the API key allows its queue.

        Raises:
            RequestRefused: It names nothing: 404. Or the API key does not allow the queue: 403.
        """
        named = await self.find(model, key)
        if key is not None and not key.allows(named.queue):
            raise RequestRefused(
                HTTPStatus.FORBIDDEN,
                f"model: the API key {key.name!r} does not allow the queue {named.queue!r}",
                code="queue_not_allowed",
                param="model",
            )
        return named

    def is_name(self, model: str, key: KeyRecord | None) -> bool:
        """Return whether `find` finds a queue by this name, and not only because any model is accepted."""
        return model in self._served or find_named(model, "", allowed_by(key, self._last_served)) is not None

    async def client(self, queue: str, *, is_stored: bool = False, waits: bool = False) -> AsyncClient:
        """Return the client of a queue.

        Args:
            queue: The queue.
            is_stored: Whether the results of the jobs of this client are stored for `response_ttl_s`.
            waits: Whether the caller waits for a worker, although requests do not.

        Raises:
            NoWorker: The queue has no live worker, and requests do not wait for one.
        """
        if not waits and not self.settings.wait_for_worker and not (await self.served()).get(queue):
            raise NoWorker(queue)
        return await self._client(queue, is_stored=is_stored)

    async def job_counters(self, queue: str) -> dict[str, int]:
        """Return the counters of the jobs of a queue, with the names of `_metrics.lua`."""
        client = await self._client(queue, is_stored=False)
        return await read_job_counters(client.connection, queue, client.connection.settings.partitions)

    async def depth(self, queue: str) -> QueueDepth:
        """Return the numbers of waiting and running jobs of a queue."""
        client = await self._client(queue, is_stored=False)
        return await queue_depth(client.redis, client.keys, queue, client.connection.settings.partitions)

    async def card(self, queue: str) -> WorkerCard | None:
        """Return the card of a worker of a queue. None: no live worker serves it."""
        workers = (await self.served()).get(queue)
        return workers[0].card if workers else None

    async def last_card(self, queue: str) -> WorkerCard | None:
        """Return the card of a worker of a queue. While no live worker serves the queue, it is the last one seen.

        None: this server has seen no worker of the queue.
        """
        card = await self.card(queue)
        if card is not None:
            self._last_cards[queue] = card
        return self._last_cards.get(queue)

    async def renewed(self, client: AsyncClient) -> AsyncClient:
        """Return the client that replaces a client whose number of partitions is wrong, see `InvalidSettings`.

        It is the same client if the workers have not stored another number.
        """
        used = self._replaced.get(client) or next(
            (used for used, each in self._clients.items() if each is client), None
        )
        if used is None:
            return client
        await self._check_partitions(*used)
        queue, is_stored = used
        return await self._client(queue, is_stored=is_stored)

    async def _client(self, queue: str, *, is_stored: bool) -> AsyncClient:
        """Return the client of a queue, with as many partitions as its workers have."""
        client = self._clients.get((queue, is_stored))
        if client is None or client in self._guessed:
            await self._check_partitions(queue, is_stored)
        return self._clients[queue, is_stored]

    async def _check_partitions(self, queue: str, is_stored: bool) -> None:
        """Create the client of a queue, or replace it if the workers have another number of partitions by now."""
        reading = QueueConfig.read(self._default.redis, self._default.keys, queue, 0)
        config = await self._damaged_settings.read(queue, reading)
        client = self._clients.get((queue, is_stored))
        if client is not None and (config is None or config.partitions == client.settings.partitions):
            if config is not None:
                self._guessed.discard(client)
            return
        if client is not None:
            self._guessed.discard(client)
            self._replaced[client] = (queue, is_stored)
        partitions = self.settings.partitions if config is None else config.partitions
        ttl_s = self.settings.response_ttl_s if is_stored else self.settings.result_ttl_s
        client = self._clients[queue, is_stored] = self._new_client(queue, partitions, result_ttl_s=ttl_s)
        if config is None:
            self._guessed.add(client)

    def _new_client(self, queue: str, partitions: int, **changed: float) -> AsyncClient:
        own = {name: getattr(self.settings, name) for name in ClientSettings.model_fields if name != "redis_url"}
        own |= {"queue": queue, "partitions": partitions, "require_worker": not self.settings.wait_for_worker}
        own |= changed
        return AsyncClient(self.settings.redis_url, **own)
