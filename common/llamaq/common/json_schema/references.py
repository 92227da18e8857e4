"""Finds the schemas that `$ref` refers to inside one document."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

Schema = Any
"""A dict with keywords, or True (any value) or False (no value). Schemas of users may also be malformed."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_IDENTIFIERS = ("$id", "id")
_NAMES = ("$anchor", *_IDENTIFIERS)
_OLD_DRAFT = re.compile("/draft-0[3-7]/")
_NAMED_ID = re.compile("#[^/]")


class References:
    """The targets of references in a document.

    Args:
        root: The whole schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.refs_stand_alone = _OLD_DRAFT.search(str(root.get("$schema"))) is not None
        """Whether keywords beside a `$ref` have no effect in the draft of the document."""
        self._anchors = {f"#{name}": schema for name, schema in _anchors(root)}
        self._have_references: dict[int, bool] = {}
        """Whether schemas of the document have references, by their identities. It takes long to find out."""

    def resolve(self, ref: Any) -> Schema | None:
        """Return the schema that a reference such as `#/$defs/a`, `#` or `#anchor` points to.

        None: it is not in the document, or it has references of its own, which an inner `$id` lets point elsewhere.
        """
        if not isinstance(ref, str):
            return None
        ref = ref.removeprefix(str(self._root.get("$id", "")).removesuffix("#"))
        if ref in self._anchors:
            return self._anchors[ref]
        schema: Any = self._root if ref.startswith("#") else None
        is_inside = False
        for part in ref.split("/")[1:]:
            is_inside = is_inside or (schema is not self._root and base_keyword(schema) is not None)
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and name in schema:
                schema = schema[name]
            elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
                schema = schema[int(name)]
            else:
                return None
        if is_inside and self._has_references(schema):
            return None
        return schema if ref.startswith("#/") or ref == "#" else None

    def _has_references(self, schema: Schema) -> bool:
        if id(schema) not in self._have_references:
            self._have_references[id(schema)] = has_references(schema)
        return self._have_references[id(schema)]


def base_keyword(schema: Schema) -> str | None:
    """Return the keyword that changes the base of the references in a schema: `$id`, `id` (draft 4) or None."""
    if not isinstance(schema, dict) or schema.keys().isdisjoint(_IDENTIFIERS):
        return None
    return next((name for name in _IDENTIFIERS if _is_text(schema.get(name)) and schema[name][:1] != "#"), None)


def has_references(schema: Schema) -> bool:
    """Return whether a schema or a schema in it may have a `$ref`."""
    return '"$ref"' in json.dumps(schema)


def _anchors(root: dict[str, Any]) -> list[tuple[str, Schema]]:
    """Return the names and schemas with `$anchor`, or with a `$id` such as `#name` (draft 7).

    Those below another base are left out, because a reference to them contains this base.
    """
    found: list[tuple[str, Schema]] = []
    waiting: list[Any] = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and (part is root or base_keyword(part) is None):
            if not part.keys().isdisjoint(_NAMES):
                found += [(part["$anchor"], part)] if _is_text(part.get("$anchor")) else []
                found += [(part[name][1:], part) for name in _IDENTIFIERS if _NAMED_ID.match(str(part.get(name)))]
            waiting += part.values() if part.keys().isdisjoint(_VALUES) else _schemas_in(part)
        elif isinstance(part, list):
            waiting += part
    return found


def _schemas_in(schema: dict[str, Any]) -> list[Any]:
    return [value for name, value in schema.items() if name not in _VALUES]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def refused(keyword: str, place: str, reason: str) -> ValueError:
    """Return the error for a keyword that is not supported."""
    return ValueError(f"`{keyword}` at {place} {reason}")
