"""`llamaq serve` with TLS: its certificate can be renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from tests.support.http_server import serving_http
from trustme import KeyType

from llamaq.gateway.http import certificate_renewal


class Authority:
    """A certificate authority, and a certificate of it for the server."""

    def __init__(self, key_type: KeyType) -> None:
        self._ca = trustme.CA()
        self._issued = self._ca.issue_cert("127.0.0.1", key_type=key_type)

    def write(self, cert: Path | None = None, key: Path | None = None) -> None:
        """Write the certificate, its key, or both."""
        if cert is not None:
            self._issued.cert_chain_pems[0].write_to_path(cert)
        if key is not None:
            self._issued.private_key_pem.write_to_path(key)

    def client(self, url: str) -> httpx.AsyncClient:
        """Return a client that trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._ca.configure_trust(context)
        return httpx.AsyncClient(base_url=url, verify=context, timeout=60)


async def wait_for(event: str, caplog: pytest.LogCaptureFixture, *, n_before: int = 0) -> None:
    while caplog.text.count(event) <= n_before:  # noqa: ASYNC110 - another task writes the log
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("key_types", [(KeyType.ECDSA, KeyType.ECDSA), (KeyType.ECDSA, KeyType.RSA)], ids=repr)
async def test_a_renewed_certificate_is_used_without_a_restart(
    redis_url: str,
    queue: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    key_types: tuple[KeyType, KeyType],
) -> None:
    monkeypatch.setattr(certificate_renewal, "CHECK_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, certificate_renewal.__name__)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old, new = map(Authority, key_types)
    old.write(cert, key)
    async with serving_http(redis_url, queue, tls_cert=cert, tls_key=key) as url, old.client(url) as http:
        assert url.startswith("https://")
        assert (await http.get("/health")).status_code in (200, 503)

        new.write(cert=cert)
        await wait_for("tls.not_renewed", caplog)
        async with old.client(url) as other:
            await other.get("/health")

        new.write(key=key)
        await wait_for("tls.renewed", caplog)
        async with new.client(url) as renewed:
            await renewed.get("/health")
        async with old.client(url) as other:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await other.get("/health")
        await http.get("/health")  # its connection stays open

        n_before = caplog.text.count("tls.not_renewed")
        key.unlink()
        await wait_for("tls.not_renewed", caplog, n_before=n_before)
        async with new.client(url) as renewed:
            await renewed.get("/health")
    assert caplog.text.count("tls.renewed") == 1
