"""The models in the form of Anthropic's API. Those of OpenAI's are tested in tests/e2e."""

from __future__ import annotations

from datetime import datetime

import httpx
from tests.support.http_server import serving_http

from llamaq.producer.testing import FakeWorker


async def test_anthropics_clients_get_the_models_and_errors_in_their_form(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue, key_prefix=queue) as worker,
        serving_http(redis_url, queue, key_prefix=queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"anthropic-version": "2023-06-01"}) as http,
    ):
        await worker.announce()
        listed = (await http.get("/v1/models")).json()
        shown = (await http.get(f"/v1/models/{queue}")).json()
        missing = (await http.get("/v1/models/no-such-queue")).json()
        del http.headers["anthropic-version"]
        of_openai = (await http.get(f"/v1/models/{queue}")).json()
    assert listed == {"data": [shown], "first_id": queue, "last_id": queue, "has_more": False}
    assert (shown["type"], shown["id"]) == ("model", queue)
    assert shown["display_name"]
    assert datetime.fromisoformat(shown["created_at"]).timestamp() == of_openai["created"]
    assert of_openai["object"] == "model"
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
