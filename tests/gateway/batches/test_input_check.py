"""A batch whose input file has wrong lines fails before any line is computed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from tests.support.batches import begin, end_of, jsonl, line
from tests.support.http_server import serving_http

from llamaq.gateway.batches.input_check import check_input
from llamaq.gateway.batches.record import BatchEndpoint


async def test_a_batch_with_wrong_lines_fails_and_names_them(redis_url: str, queue: str) -> None:
    lines: list[object] = [
        line("a", "x"),
        "{",
        line("a", "x"),
        line("b", "x", model="other"),
        {**line("c", "x"), "url": "/v1/completions"},
        {"custom_id": "d"},
        '{"custom_id": "e", "body": {"temperature": NaN}}',
        '{"a":' * 100 + "1" + "}" * 100,
        '{"a": [' + "[], " * 200_000 + "1]}",
    ]
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        failed = await end_of(http, await begin(http, jsonl(*lines)))
        empty = await end_of(http, await begin(http, b"\n"))
        unknown = await end_of(http, await begin(http, jsonl(line("a", "x", model="no-such"))))
        late = await http.post(f"/v1/batches/{failed['id']}/cancel")
    assert [(each["line"], each["code"]) for each in failed["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_model"),
        (5, "mismatched_url"),
        (6, "missing_required_parameter"),
        (7, "invalid_json_line"),
        (8, "invalid_json_line"),
        (9, "invalid_json_line"),
    ]
    assert failed["output_file_id"] is None
    assert [each["errors"]["data"][0]["code"] for each in (empty, unknown)] == ["empty_file", "model_not_found"]
    assert late.status_code == 400


@pytest.mark.parametrize("broken", ["{", {"custom_id": "x"}, {"custom_id": "x", "body": {"model": 1}}])
async def test_a_wrong_first_line_does_not_make_the_models_of_the_others_wrong(broken: object) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        yield jsonl(broken, *(line(name, "x", model="m") for name in "abc"), line("d", "x", model="n"))

    found = await check_input(blocks(), BatchEndpoint.CHAT, 1000)
    assert (found.n_lines, found.model) == (5, "m")
    assert [each["line"] for each in found.errors] == [1, 5]
    assert found.errors[1]["code"] == "mismatched_model"
