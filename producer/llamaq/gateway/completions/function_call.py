"""Answers in the old form of a call, for requests with `functions`."""

from __future__ import annotations

from typing import Any


def as_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, or the delta of a chunk, whose only call has the form of `functions`: without an id."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "function_call": calls[0]["function"]}
