"""A Redis in the process of the tests: fakeredis with a Lua interpreter and the `cmsgpack` that our scripts call.

It serves tests of client and script logic in milliseconds. `tests/common/protocol/test_scripts.py` is the contract:
the same cases run on this server and on a real one.
"""

from __future__ import annotations

from typing import Any

import fakeredis
import lupa.lua51
import msgpack
import pytest

from llamaq.common.redis import connect as connect_module

URL = "redis://fakeredis:6379/0"
"""What a client connects to. The connection is replaced, so the name of the host is not resolved."""


def replace_redis(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make `connect` reach a new, empty fake server until the test ends. Returns the URL to connect to."""
    server = fakeredis.FakeServer(version=(7,), server_type="redis")

    class InProcess(fakeredis.FakeAsyncRedisConnection):
        def __init__(self, **options: Any) -> None:
            # With health checks, redis-py waits for ever for an answer of fakeredis 2.40.
            super().__init__(server=server, **(options | {"health_check_interval": 0}))

    add_cmsgpack(server)
    monkeypatch.setattr(connect_module, "Connection", InProcess)
    return URL


def add_cmsgpack(server: fakeredis.FakeServer) -> None:
    """Give the server's Lua interpreter the global `cmsgpack`, which fakeredis does not have."""
    fakeredis.FakeRedis(server=server).eval("return 1", 0)  # creates the interpreter
    internals: Any = server
    lua = internals._lua_runtime

    def pack(value: Any) -> bytes:
        packed: bytes = msgpack.packb(to_python(value), use_bin_type=False)  # as Redis packs a string of Lua
        return packed

    def unpack(packed: bytes) -> Any:
        return to_lua(lua, msgpack.unpackb(packed, raw=True))

    lua.globals()[b"cmsgpack"] = lua.table_from({b"pack": pack, b"unpack": unpack})
    internals._lua_expected_globals.add(b"cmsgpack")


def to_python(value: Any) -> Any:
    """Return a Lua value as Python has it: a table with the keys 1, 2, 3 ... is a list, any other table is a dict."""
    if lupa.lua51.lua_type(value) != "table":
        return value
    items = {key: to_python(each) for key, each in value.items()}
    is_list = bool(items) and list(items) == list(range(1, len(items) + 1))
    return list(items.values()) if is_list else items


def to_lua(lua: Any, value: Any) -> Any:
    """Return a Python value as Lua has it: a list and a dict become tables."""
    if isinstance(value, list):
        return lua.table_from([to_lua(lua, each) for each in value])
    if isinstance(value, dict):
        return lua.table_from({key: to_lua(lua, each) for key, each in value.items()})
    return value
