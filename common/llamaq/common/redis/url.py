"""What a Redis URL says.

| URL                                                              | is                                           |
| ---------------------------------------------------------------- | -------------------------------------------- |
| `redis://[user:password@]host[:6379][/db]`                       | one server                                   |
| `unix:///path[?db=0]`                                            | one server, by its socket                    |
| `redis+sentinel://[user:password@]host[:26379],host,.../name[/db]` | the master that these Sentinels call `name` |
| `redis+cluster://[user:password@]host[:6379],host,...`           | a Redis Cluster; some of its nodes           |

`rediss` instead of `redis` is the same over TLS. Options follow as a query: those of redis-py's connections
(`?ssl_ca_certs=/path`), and for Sentinels that ask for a login `sentinel_username` and `sentinel_password`. User and
password are those of the data servers. Special characters in them are written as %XX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import parse_url

from llamaq.common.errors import InvalidSettings

SENTINEL_PORT = 26379
CLUSTER_PORT = 6379


class Kind(Enum):
    """What stands behind a URL."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL, read. `options` are arguments of redis-py's connections."""

    kind: Kind
    options: dict[str, Any]
    hosts: tuple[tuple[str, int], ...] = ()
    """Of the Sentinels, or of nodes of the cluster."""
    service: str = ""
    """What the Sentinels call the master."""
    sentinel_options: dict[str, Any] | None = None
    """Arguments of the connections to the Sentinels."""


def read_url(url: str) -> RedisUrl:
    """Raises `InvalidSettings` for what is no URL of Redis."""
    try:
        scheme, plus, kind = url.partition("://")[0].partition("+")
        if not plus:
            return RedisUrl(Kind.SERVER, dict(parse_url(url)))
        if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
            raise ValueError(f"{scheme}+{kind}:// is not known, only redis+sentinel:// and redis+cluster://")
        return _read_sentinel(url, scheme) if kind == "sentinel" else _read_cluster(url, scheme)
    except ValueError as exc:
        raise InvalidSettings(f"--redis-url (LLAMAQ_REDIS_URL): {exc}") from exc


def _split(url: str) -> tuple[str, str, str]:
    """Net location, path and query. `urlsplit` takes one host: newer ones refuse a list with an IPv6 address in it."""
    rest = url.partition("://")[2].partition("#")[0]
    place, _, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    return netloc, path, query


def _read_sentinel(url: str, scheme: str) -> RedisUrl:
    netloc, path, text = _split(url)
    service, _, db = path.partition("/")
    if db and not db.isdecimal():
        raise ValueError(f"{db!r} is not the number of a database")
    if not service:
        raise ValueError("the name that the Sentinels give the master is missing: redis+sentinel://host:26379/NAME")
    query = dict(parse_qsl(text))
    login = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    options = _options(scheme, netloc, db, query)
    own = {name: value for name, value in options.items() if name.startswith("ssl_")} | {"ssl": scheme == "rediss"}
    return RedisUrl(
        Kind.SENTINEL,
        options,
        _hosts(netloc, SENTINEL_PORT),
        unquote(service),
        own | {name: value for name, value in login.items() if value is not None},
    )


def _read_cluster(url: str, scheme: str) -> RedisUrl:
    netloc, path, query = _split(url)
    if path not in ("", "0"):
        raise ValueError("a Redis Cluster has no database but 0")
    options = _options(scheme, netloc, "", dict(parse_qsl(query)))
    return RedisUrl(Kind.CLUSTER, options, _hosts(netloc, CLUSTER_PORT))


def _hosts(netloc: str, port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for one in netloc.rpartition("@")[2].split(","):
        place = urlsplit(f"//{one}")
        if not place.hostname:
            raise ValueError(f"{one!r} is not a host")
        found.append((place.hostname, place.port or port))
    return tuple(found)


def _options(scheme: str, netloc: str, db: str, query: dict[str, str]) -> dict[str, Any]:
    """The arguments of a connection, read by redis-py as for one server; without a place."""
    login, at, _ = netloc.rpartition("@")
    options = dict(parse_url(f"{scheme}://{login}{at}host/{db}?{urlencode(query)}"))
    del options["host"]
    return options
