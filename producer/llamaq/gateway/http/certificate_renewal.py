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

    Args:
        context: Gets the new certificate, for connections from then on.
        cert: PEM file with the certificate chain.
        key: PEM file with its private key.
    """

    def __init__(self, context: ssl.SSLContext, cert: Path, key: Path) -> None:
        self._context = context
        self._files = (cert, key)
        self._versions = self._read_versions()

    async def watch(self) -> None:
        """Load the files each time when they have changed, until this task is cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if (versions := self._read_versions()) != self._versions:
                self._versions = versions
                self._load()

    def _read_versions(self) -> list[tuple[int, int, int] | None]:
        return [_version_of(file) for file in self._files]

    def _load(self) -> None:
        """Load both files. While only one of them is new, they do not belong together, and the old ones stay in use."""
        try:
            check_certificate(*self._files)
            self._context.load_cert_chain(*self._files)
        except OSError as exc:  # an SSLError is one too
            log.warning("tls.not_renewed error=%s: the certificate that was loaded before stays in use", exc)
        else:
            log.info("tls.renewed cert=%s", self._files[0])


def check_certificate(cert: Path, key: Path) -> None:
    """Load a certificate and its key for nothing. A failure leaves a context with only one of them.

    Raises:
        OSError: They cannot be used.
    """
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
