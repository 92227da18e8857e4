"""Defines which jobs may share the KV cells of a prompt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32, person=b"llamaq scope").digest()


PUBLIC = _hash(b"public")
"""Key of the tokens that all namespaces share. No namespace has this key, because it is the hash of another text."""


@lru_cache(maxsize=1024)
def namespace_key(namespace: str) -> bytes:
    """Return the 32-byte key of a namespace, for memory and files. It never equals `PUBLIC`."""
    return _hash(b"namespace:" + namespace.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Scope:
    """The jobs that may share a prompt's cells.

    The first `public` tokens are shared with every job that also declares them public. The tokens after them are
    shared within `namespace` only.
    """

    namespace: str = ""
    public: int = 0
    hashed: bytes | None = None
    """The key of the namespace, set when only the key is known. If None, the key is the hash of `namespace`."""

    def with_adapters(self, scales: tuple[float, ...]) -> Scope:
        """Return the scope of a job that uses the LoRA adapters with these scales. Only such jobs share cells."""
        text = b"adapters:" + repr(scales).encode() + b":" + self.key
        return Scope(self.namespace, hashed=_hash(text))

    @property
    def key(self) -> bytes:
        """The 32-byte key of the namespace."""
        return self.hashed or namespace_key(self.namespace)

    def n_shared(self, other: Scope) -> int | None:
        """Return how many first tokens two jobs with these scopes may share. None: all."""
        return None if self.key == other.key else min(self.public, other.public)
