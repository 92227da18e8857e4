"""Finds the schemas that `$ref` refers to inside one document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

Schema = Any
"""A dict with keywords, or True (any value) or False (no value). Schemas of users may also be malformed."""


class References:
    """The targets of references in a document.

    Args:
        root: The whole schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._anchors = {f"#{name}": schema for name, schema in _anchors(root)}

    def resolve(self, ref: Any) -> Schema | None:
        """Return the schema that a reference such as `#/$defs/a`, `#` or `#anchor` points to.

        None: it is not in the document.
        """
        if not isinstance(ref, str):
            return None
        ref = ref.removeprefix(str(self._root.get("$id", "")).removesuffix("#"))
        if ref in self._anchors:
            return self._anchors[ref]
        schema: Any = self._root if ref.startswith("#") else None
        for part in ref.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and name in schema:
                schema = schema[name]
            elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
                schema = schema[int(name)]
            else:
                return None
        return schema if ref.startswith("#/") or ref == "#" else None


def _anchors(root: dict[str, Any]) -> list[tuple[str, Schema]]:
    """Return the names and schemas with `$anchor`."""
    found: list[tuple[str, Schema]] = []
    waiting: list[Any] = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$anchor"), str):
                found.append((part["$anchor"], part))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found


def refused(keyword: str, place: str, reason: str) -> ValueError:
    """Return the error for a keyword that is not supported."""
    return ValueError(f"`{keyword}` at {place} {reason}")
