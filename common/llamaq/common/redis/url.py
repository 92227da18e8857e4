"""Parses Redis URLs: of one server, of Sentinels and of a cluster. `docs/redis.md` says what their parts mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import parse_url

from llamaq.common.errors import InvalidSettings

OPTIONS = (
    "username", "password", "client_name", "socket_timeout", "socket_connect_timeout", "socket_keepalive",
    "socket_read_size", "health_check_interval",
)  # fmt: skip
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile", "ssl_password",
    "ssl_check_hostname", "ssl_ciphers", "ssl_min_version", "ssl_include_verify_flags", "ssl_exclude_verify_flags",
)  # fmt: skip
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
SENTINEL_PORT = 26379
CLUSTER_PORT = 6379


class Topology(Enum):
    """How the Redis servers behind a URL are organised."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL.

    Attributes:
        topology: How the servers are organised.
        options: Arguments of redis-py's connections to the data servers.
        hosts: Host and port of each Sentinel, or of some nodes of the cluster.
        service: Name that the Sentinels give the master.
        sentinel_options: Arguments of redis-py's connections to the Sentinels.
    """

    topology: Topology
    options: dict[str, Any]
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] | None = None


def read_url(url: str) -> RedisUrl:
    """Return the parsed URL.

    Raises:
        InvalidSettings: The URL is not valid.
    """
    try:
        scheme, plus, topology = url.partition("://")[0].partition("+")
        _check_login(url, scheme)
        _check_options(url, scheme, topology)
        if re.search(r":0+(,|$)", _split(url)[0].rpartition("@")[2]):
            raise ValueError("0 is not the number of a port")  # redis-py would use the default port
        if not plus:
            return _read_server(url, scheme)
        if scheme not in ("redis", "rediss") or topology not in ("sentinel", "cluster"):
            raise ValueError(f"{scheme}+{topology}:// is not known, only redis+sentinel:// and redis+cluster://")
        return _read_sentinel(url, scheme) if topology == "sentinel" else _read_cluster(url, scheme)
    except ValueError as exc:
        raise InvalidSettings(f"--redis-url (LLAMAQ_REDIS_URL): {exc}") from exc


def _check_login(url: str, scheme: str) -> None:
    """Refuse a password that ends the login too early. Other errors would show a part of it.

    After the host, only the value of a known option may contain an `@`.
    """
    _, path, query = _split(url)
    known = (*OPTIONS, *TLS_OPTIONS, *SENTINEL_OPTIONS)
    others = [option for option in query.split("&") if option.partition("=")[0] not in known]
    if scheme != "unix" and any("@" in each for each in (path, url.partition("#")[2], *others)):
        raise ValueError(
            "in a user name or password, write %2F in place of /, %3F in place of ? and %23 in place of #; "
            "after the host, write %40 in place of @"
        )


def _check_options(url: str, scheme: str, topology: str) -> None:
    """Check the query. redis-py would raise a `TypeError` for an unknown name, and an error for a missing file, when it
    connects.
    """
    known: tuple[str, ...] = OPTIONS
    if scheme == "rediss":
        known += TLS_OPTIONS
    if topology == "sentinel":
        known += SENTINEL_OPTIONS
    if not topology:
        known += ("db",)
    for name, value in parse_qsl(_split(url)[2]):
        if name not in known:
            only_tls = " without TLS (rediss://)" if name in TLS_OPTIONS else ""
            raise ValueError(f"{name!r} is not an option of this URL{only_tls}; the options are {', '.join(known)}")
        if name in TLS_FILES:
            _check_readable(name, value)


def _check_readable(name: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as exc:
        raise ValueError(f"{name}={path} cannot be read: {exc.strerror}") from exc


def _read_server(url: str, scheme: str) -> RedisUrl:
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            "the schemes of URLs are redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, "
            "redis+cluster:// and rediss+cluster://"
        )
    if scheme != "unix":
        _check_database(_split(url)[1])
    return RedisUrl(Topology.SERVER, dict(parse_url(url)))


def _check_database(db: str) -> None:
    """Check the number of a database. redis-py would use database 0 for any other text."""
    if db and not db.isdecimal():
        raise ValueError(f"{db!r} is not the number of a database")


def _split(url: str) -> tuple[str, str, str]:
    """Return net location, path and query.

    `urlsplit` expects one host. In newer versions of Python it refuses a list of hosts with an IPv6 address.
    """
    rest = url.partition("://")[2].partition("#")[0]
    location, _, query = rest.partition("?")
    netloc, _, path = location.partition("/")
    return netloc, path, query


def _read_sentinel(url: str, scheme: str) -> RedisUrl:
    netloc, path, text = _split(url)
    service, _, db = path.partition("/")
    _check_database(db)
    if not service:
        raise ValueError("the name that the Sentinels give the master is missing: redis+sentinel://host:26379/NAME")
    query = dict(parse_qsl(text))
    login = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    options = _options(scheme, netloc, db, query)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")} | {"ssl": scheme == "rediss"}
    return RedisUrl(
        Topology.SENTINEL,
        options,
        _hosts(netloc, SENTINEL_PORT),
        unquote(service),
        tls | {name: value for name, value in login.items() if value is not None},
    )


def _read_cluster(url: str, scheme: str) -> RedisUrl:
    netloc, path, query = _split(url)
    if path not in ("", "0"):
        raise ValueError("a Redis Cluster has only database 0")
    options = _options(scheme, netloc, "", dict(parse_qsl(query)))
    return RedisUrl(Topology.CLUSTER, options, _hosts(netloc, CLUSTER_PORT))


def _hosts(netloc: str, port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for host in netloc.rpartition("@")[2].split(","):
        address = urlsplit(f"//{host}")
        if not address.hostname:
            raise ValueError(f"{host!r} is not a host")
        found.append((address.hostname, address.port or port))
    return tuple(found)


def _options(scheme: str, netloc: str, db: str, query: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of a connection, without host and port, as redis-py reads them for one server."""
    login, at, _ = netloc.rpartition("@")
    options = dict(parse_url(f"{scheme}://{login}{at}host/{db}?{urlencode(query)}"))
    del options["host"]
    return options
