"""Lets a Lua script run as on a server whose clock differs, on a real Redis."""

from __future__ import annotations

from redis.commands.core import AsyncScript

_SHIFTED = """
local unshifted = redis
local redis = setmetatable({{call = function(command, ...)
  local reply = unshifted.call(command, ...)
  return command == 'TIME' and {{reply[1] + {ahead_s}, reply[2]}} or reply
end}}, {{__index = unshifted}})
"""


def with_clock(script: AsyncScript, ahead_s: int) -> AsyncScript:
    """Return the script of a server whose clock is ahead of that of the real server by `ahead_s` seconds."""
    text = script.script.decode() if isinstance(script.script, bytes) else str(script.script)
    return script.registered_client.register_script(_SHIFTED.format(ahead_s=ahead_s) + text)
