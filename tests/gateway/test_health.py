"""/health tells soon whether Redis answers."""

from __future__ import annotations

import httpx
import pytest
from tests.support.http_server import serving_http
from tests.support.tcp_proxy import Proxy

from llamaq.gateway.routes import slots_props_metrics
from llamaq.worker.local.embedded_redis import EmbeddedRedis


@pytest.mark.starts_processes
async def test_health_does_not_wait_for_the_timeout_of_a_silent_redis(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_props_metrics, "HEALTH_TIMEOUT_S", 60.0)  # a busy machine may take long to answer
    with EmbeddedRedis() as server, Proxy(server.url) as proxy:
        async with (
            serving_http(f"{proxy.url}?socket_timeout=300", queue) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            assert (await http.get("/health")).status_code == 200
            proxy.silence()
            with monkeypatch.context() as during_silence:
                during_silence.setattr(slots_props_metrics, "HEALTH_TIMEOUT_S", 0.5)
                answer = await http.get("/health")
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "Redis cannot be reached; try again later"
            assert answer.headers["Retry-After"]
            proxy.cut()
            assert (await http.get("/health")).status_code == 200
