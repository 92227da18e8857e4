"""Which jobs may share the KV cells of a prompt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

PUBLIC = hashlib.blake2b(b"public", digest_size=32, person=b"llamaq scope").digest()
"""The key of what is shared among all namespaces. No namespace has it: theirs are hashes of other texts."""


@lru_cache(maxsize=1024)
def namespace_key(namespace: str) -> bytes:
    """32 bytes that stand for the namespace, in memory and in files; none are `PUBLIC`, whatever the namespace."""
    text = b"namespace:" + namespace.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=32, person=b"llamaq scope").digest()


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share a prompt's tokens: the first `public` all who declare so, the others `namespace` alone."""

    namespace: str = ""
    public: int = 0
    hashed: bytes | None = None
    """The key of the namespace, where its name is not known."""

    @property
    def key(self) -> bytes:
        return self.hashed or namespace_key(self.namespace)
