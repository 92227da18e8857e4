"""A client of Redis Cluster. A node that does not answer delays only the commands for its own keys.

redis-py's cluster client is not used. After each error it reads the map of the cluster again, from one node after
another, before it sends any other command. So one silent master would stop the commands to all other masters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llamaq.common.background_tasks import BackgroundTasks, cancel_tasks, drop_error
from llamaq.common.redis.client import BLOCKING, RetryingRedis
from llamaq.common.redis.pool import BoundedPool
from llamaq.common.redis.shared_round_trips import CLOSED, Command

Address = tuple[str, int]

KEYLESS = ("PING", "TIME", "INFO", "CONFIG GET", "CLIENT LIST", "CLUSTER SLOTS")
"""Commands without a key. Any node executes them."""
N_SLOTS = 16384
MAX_REDIRECTIONS = 5
MAX_BLOCKED = 10_000
"""Upper bound on the blocking commands to one node."""
KEYLESS_TIMEOUT_S = 1.0
"""How long a command without a key waits for the reply of one node. The next try goes to another node."""
MAP_TIMEOUT_S = 2.0
"""How long the map waits for the reply of one node."""
NODES_PER_TRY, NEXT_TRY_S = 3, 0.25
"""The map is read from this number of nodes at once. If none of them replies in time, it is read from the same number
of other nodes."""


class Node:
    """The clients of one node. They do not retry."""

    def __init__(self, make_pool: Callable[[int | None], BoundedPool], known_scripts: dict[str, str]) -> None:
        self.commands = RetryingRedis(make_pool(None), 0, known_scripts=known_scripts)
        self.blocking = RetryingRedis(make_pool(MAX_BLOCKED), 0, known_scripts=known_scripts)

    async def aclose(self) -> None:
        await asyncio.gather(
            self.commands.close_connections(), self.blocking.close_connections(), return_exceptions=True
        )


class Cluster(RetryingRedis):
    """Sends each command to the master of its key's hash slot, and finds the new master after a change.

    Every node has a pool of its own. The map of hash slots is read in the background, from several nodes at once, when
    a command fails. Commands wait for a map only before the first map is known. All commands of a pipeline with a
    transaction must have keys of the same hash slot.
    """

    def __init__(
        self, hosts: Iterable[Address], make_pool: Callable[[Address, int | None], BoundedPool], retry_s: float
    ) -> None:
        """Create a client, which connects at the first command.

        Args:
            hosts: Host and port of some nodes.
            make_pool: Returns a new pool of connections to a node, given the upper bound on the connections. None: the
                usual bound.
            retry_s: How long a command is retried, in seconds.
        """
        self._hosts = list(hosts)
        self._make_pool = make_pool
        self._nodes: dict[Address, Node] = {}
        self._masters: list[Address | None] = []
        """The address of the master of each hash slot. Empty: the map is not known yet."""
        self._replicas: set[Address] = set()
        self._loading: asyncio.Task[None] | None = None
        self._failed: dict[Address, float] = {}
        """When a node last failed. Commands without a key go to the node that has not failed for the longest time."""
        self._tasks = BackgroundTasks()
        super().__init__(make_pool(self._hosts[0], None), retry_s)

    def __repr__(self) -> str:
        return f"<Cluster nodes={sorted(self._nodes)}>"

    # ---- commands

    async def send(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Send one command to the master of its key, and follow redirections, without a retry."""
        key = _key_of(args)
        address = await self._find(key)
        if key is None:
            return await self._send_keyless(address, args, options)
        is_asking = False
        for _ in range(MAX_REDIRECTIONS):
            try:
                return await self._send_to(address, args, options, is_asking=is_asking)
            except AskError as exc:
                address = (exc.host or address[0], exc.port)
                is_asking = not isinstance(exc, MovedError)  # redis-py's `MovedError` is an `AskError`
                if not is_asking:
                    self._masters[exc.slot_id] = address
                    self._reload_soon()
        raise RedisConnectionError(f"the cluster redirected a command {MAX_REDIRECTIONS} times")

    async def _send_keyless(self, address: Address, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            async with asyncio.timeout(KEYLESS_TIMEOUT_S):
                return await self._send_to(address, args, options)
        except TimeoutError as exc:
            raise self._note_failure(address, RedisTimeoutError(f"{_name(address)}: no reply")) from exc

    async def _send_to(
        self, address: Address, args: Sequence[Any], options: Mapping[str, Any], *, is_asking: bool = False
    ) -> Any:
        node = self._node(address)
        client = node.blocking if args[0] in BLOCKING else node.commands
        try:
            if is_asking:
                if args[0] == "EVALSHA" and args[1] in self.known_scripts:
                    args = self._with_text(args)
                reply = (await client.send_pipeline([(("ASKING",), {}), (tuple(args), options)], False))[1]
                if isinstance(reply, RedisError):
                    raise reply
                return reply
            return await client.send(args, options)
        except (RedisConnectionError, RedisTimeoutError, ClusterDownError, TryAgainError) as exc:
            raise self._note_failure(address, exc) from exc

    def _note_failure(self, address: Address, error: RedisError) -> RedisError:
        """Read the map again, and return an error that is retried."""
        self._failed[address] = asyncio.get_running_loop().time()
        self._reload_soon()
        return error if isinstance(error, RedisTimeoutError) else RedisConnectionError(f"{_name(address)}: {error}")

    async def send_pipeline(self, commands: Sequence[Command], transaction: bool) -> list[Any]:
        """Send commands to their nodes in one round trip each, without a retry."""
        places: dict[Address, list[int]] = {}
        for place, (args, _) in enumerate(commands):
            places.setdefault(await self._find(_key_of(args)), []).append(place)
        parts = await asyncio.gather(
            *(
                self._send_part(address, [commands[place] for place in some], transaction)
                for address, some in places.items()
            ),
            return_exceptions=True,
        )
        replies: list[Any] = [None] * len(commands)
        for some, part in zip(places.values(), parts, strict=True):
            if isinstance(part, BaseException):
                raise part
            for place, reply in zip(some, part, strict=True):
                replies[place] = reply
        return replies

    async def send_together(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands to the master that has the key, over one connection, without a retry."""
        return await self._send_part(await self._find(key), commands, False, is_together=True)

    async def _send_part(
        self, address: Address, commands: Sequence[Command], transaction: bool, *, is_together: bool = False
    ) -> list[Any]:
        try:
            replies = await self._node(address).commands.send_pipeline(commands, transaction)
            redirected = [isinstance(reply, AskError | TryAgainError | ClusterDownError) for reply in replies]
            if is_together and redirected != sorted(redirected):  # WAIT ran without its write
                raise replies[redirected.index(True)]
        except MovedError as exc:  # all keys have moved
            self._masters[exc.slot_id] = (exc.host or address[0], exc.port)
            raise self._note_failure(address, exc) from exc
        except (RedisConnectionError, RedisTimeoutError, ClusterDownError, TryAgainError, AskError) as exc:
            raise self._note_failure(address, exc) from exc
        for place, moved in enumerate(redirected):
            if moved:
                replies[place] = await self.send(*commands[place])
        return replies

    async def scan_iter(self, *args: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Yield the keys of all masters. See `Redis.scan_iter`."""
        for master in (await self.masters()).values():
            async for key in master.scan_iter(*args, **options):
                yield key

    async def masters(self) -> dict[str, RetryingRedis]:
        """Return a client of each master by the master's name."""
        await self._find(None)
        addresses = sorted({master for master in self._masters if master is not None})
        return {_name(address): self._node(address).commands for address in addresses}

    # ---- the map

    def node_of(self, key: str) -> str | None:
        """Return the name of the master that has the key. None: it is not known."""
        address = self._masters[key_slot(key.encode())] if self._masters else None
        return None if address is None else _name(address)

    def pool_of(self, node: str) -> BoundedPool:
        """Return the pool of connections to a node that `node_of` named."""
        host, _, port = node.rpartition(":")
        return self._node((host, int(port))).commands.pool

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            if self._is_closed:
                raise RedisConnectionError(CLOSED)
            self._nodes[address] = Node(lambda limit: self._make_pool(address, limit), self.known_scripts)
        return self._nodes[address]

    async def _find(self, key: str | bytes | None) -> Address:
        """Return the address of the master of a key, or of any master if there is no key."""
        if not self._masters:
            await asyncio.wait([loading := self._reload_soon()])
            if self._is_closed:
                raise RedisConnectionError(CLOSED)
            loading.result()
        if key is None:
            masters = {address for address in self._masters if address is not None}
            return min(masters, key=lambda address: (self._failed.get(address, 0.0), address))
        slot = key_slot(key if isinstance(key, bytes) else key.encode())
        address = self._masters[slot]
        if address is None:
            self._reload_soon()
            raise RedisConnectionError(f"no node of the cluster serves hash slot {slot}")
        return address

    def _reload_soon(self) -> asyncio.Task[None]:
        """Read the map in the background. While it is read, further calls have no effect."""
        if self._loading is None or self._loading.done():
            self._loading = self._tasks.start(self._reload())
            self._loading.add_done_callback(drop_error)
        return self._loading

    async def _reload(self) -> None:
        """Read the map from the first node that replies.

        Raises:
            RedisConnectionError: No node replied.
        """
        known = dict.fromkeys([*self._nodes, *self._replicas, *self._hosts])
        left = sorted(known, key=lambda address: (self._failed.get(address, 0.0), random.random()))
        tasks: list[asyncio.Task[Any]] = []
        asked: set[asyncio.Task[Any]] = set()
        errors: list[BaseException] = []
        try:
            while left or asked:
                new = [asyncio.create_task(self._read_map(address)) for address in left[:NODES_PER_TRY]]
                tasks += new
                asked.update(new)
                del left[:NODES_PER_TRY]
                done, asked = await asyncio.wait(
                    asked, timeout=NEXT_TRY_S if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if (error := task.exception()) is None:
                        self._use_map(*task.result())
                        return
                    errors.append(error)
        finally:
            await cancel_tasks(*tasks)
        error = errors[-1] if errors else None
        raise RedisConnectionError(f"no node of the cluster answers: {error or 'none is known'}") from error

    async def _read_map(self, address: Address) -> tuple[Address, Any]:
        async with asyncio.timeout(MAP_TIMEOUT_S):
            ranges = await self._node(address).commands.send(["CLUSTER SLOTS"], {})
        if not ranges:
            raise RedisConnectionError(f"{_name(address)}: this node knows no hash slots")
        return address, ranges

    def _use_map(self, source: Address, ranges: Any) -> None:
        masters: list[Address | None] = [None] * N_SLOTS
        replicas: set[Address] = set()
        for first, last, *servers in ranges:
            master, *others = [(_decode_host(server[0]) or source[0], int(server[1])) for server in servers]
            masters[first : last + 1] = [master] * (last + 1 - first)
            replicas.update(others)
        self._masters, self._replicas = masters, replicas
        self._tasks.start(self._close_unknown({*masters, *replicas, *self._hosts}))

    async def _close_unknown(self, known: set[Address | None]) -> None:
        """Close the connections to nodes that have left the cluster."""
        for address in [address for address in self._nodes if address not in known]:
            self._failed.pop(address, None)
            await self._nodes.pop(address).aclose()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: ARG002
        """See `RetryingRedis.aclose`."""
        self._is_closed = True
        await self._tasks.cancel()
        nodes, self._nodes = list(self._nodes.values()), {}
        await asyncio.gather(*(node.aclose() for node in nodes))


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _key_of(args: Sequence[Any]) -> str | bytes | None:
    """Return the first key of a command. None: the command has no key."""
    command = args[0]
    if command in ("EVAL", "EVALSHA"):
        return args[3] if int(args[2]) else None
    if command in ("XREAD", "XREADGROUP"):
        key: str | bytes = next(after for word, after in pairwise(args) if word in (b"STREAMS", "STREAMS"))
        return key
    if command in KEYLESS or len(args) == 1:
        return None
    first: str | bytes = args[1]
    return first


def _decode_host(host: bytes | None) -> str:
    """Return the host of a node. Empty: the node has the host that the map was read from."""
    return "" if host in (None, b"", b"?") else host.decode()
