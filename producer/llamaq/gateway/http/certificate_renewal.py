"""Loads the server's certificate again when its files have changed, so that a renewed one needs no restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds between two looks at the files."""


class CertificateRenewal:
    """Watches the files of a certificate and its key.

    A renewed certificate gets a context of its own, which new connections take over: if it were loaded into the
    server's context, a certificate with another kind of key would stay there beside it.

    Args:
        context: The context of the server. Its connections get the newest certificate.
        cert: PEM file with the certificate chain.
        key: PEM file with its private key.
    """

    def __init__(self, context: ssl.SSLContext, cert: Path, key: Path) -> None:
        self._files = (cert, key)
        self._newest = context
        self._versions = self._read_versions()
        context.sni_callback = self._use_newest

    async def watch(self) -> None:
        """Load the files each time when they have changed, until this task is cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if (versions := self._read_versions()) != self._versions:
                self._versions = versions
                self._load()

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called when the first message of a client has arrived, even if it names no server."""
        connection.context = self._newest

    def _read_versions(self) -> list[tuple[int, int, int] | None]:
        return [_version_of(file) for file in self._files]

    def _load(self) -> None:
        """Load both files. While only one of them is new, they do not belong together, and the old ones stay in use."""
        try:
            self._newest = load_certificate(*self._files)
        except OSError as exc:  # SSLError is a subclass
            log.warning("tls.not_renewed error=%s: the certificate that was loaded before stays in use", exc)
        else:
            log.info("tls.renewed cert=%s", self._files[0])


def load_certificate(cert: Path, key: Path) -> ssl.SSLContext:
    """Return a context with a certificate and its key.

    Raises:
        OSError: They cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
