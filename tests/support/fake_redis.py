"""A fake Redis in the test process: fakeredis with a Lua interpreter and the `cmsgpack` that llamaq's scripts call.

With it, tests of the client and of the scripts are fast. The tests of the scripts in `tests/common/protocol` run the
same cases on this fake server and on a real one.
"""

from __future__ import annotations

from typing import Any

import fakeredis
import lupa.lua51
import msgpack
import pytest

from llamaq.common.redis import connect as connect_module
from llamaq.producer.streaming import poll_schedule

URL = "redis://fakeredis:6379/0"
"""The URL of the fake server. Its host name is never resolved, because the connection class is replaced."""


@pytest.fixture(params=["redis-server", "fakeredis"])
def url_of_each_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a real server, and then of a fake one. A module that assigns it to `redis_url` tests with both."""
    if request.param == "fakeredis":
        return replace_redis(monkeypatch)
    url: str = request.getfixturevalue("redis_server").url
    return url


def replace_redis(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let `connect` use a new, empty fake server until the test ends, and return its URL."""
    server = fakeredis.FakeServer(version=(7,), server_type="redis")

    class InProcess(fakeredis.FakeAsyncRedisConnection):
        def __init__(self, **options: Any) -> None:
            # With health checks, redis-py waits forever for a reply of fakeredis 2.40.
            super().__init__(server=server, **(options | {"health_check_interval": 0}))

    add_cmsgpack(server)
    monkeypatch.setattr(connect_module, "Connection", InProcess)
    # The subscriber cannot read messages of fakeredis, so readers see the end of a job only when they poll it.
    monkeypatch.setattr(poll_schedule, "WAITING_SILENCE_S", 0.05)
    return URL


def add_cmsgpack(server: fakeredis.FakeServer) -> None:
    """Define the global `cmsgpack` in the server's Lua interpreter, because fakeredis does not provide it."""
    fakeredis.FakeRedis(server=server).eval("return 1", 0)  # this creates the interpreter
    internals: Any = server
    lua = internals._lua_runtime

    def pack(value: Any) -> bytes:
        packed: bytes = msgpack.packb(
            to_python(value), use_bin_type=False
        )  # Redis packs Lua strings without the bin type too
        return packed

    def unpack(packed: bytes) -> Any:
        return to_lua(lua, msgpack.unpackb(packed, raw=True))

    lua.globals()[b"cmsgpack"] = lua.table_from({b"pack": pack, b"unpack": unpack})
    internals._lua_expected_globals.add(b"cmsgpack")


def to_python(value: Any) -> Any:
    """Convert a Lua value to Python. A table with the keys 1, 2, 3, ... becomes a list, any other table a dict."""
    if lupa.lua51.lua_type(value) != "table":
        return value
    items = {key: to_python(each) for key, each in value.items()}
    is_list = bool(items) and list(items) == list(range(1, len(items) + 1))
    return list(items.values()) if is_list else items


def to_lua(lua: Any, value: Any) -> Any:
    """Convert a Python value to Lua. A list and a dict become tables."""
    if isinstance(value, list):
        return lua.table_from([to_lua(lua, each) for each in value])
    if isinstance(value, dict):
        return lua.table_from({key: to_lua(lua, each) for key, each in value.items()})
    return value
