"""A row that cannot be computed is one line of the file of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.bulk_runs import Rows, served_client, serving, texts
from tests.support.dead_letters import crash_workers

from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkState, drop_errors, execute, execution, input_row
from llamaq.producer.bulk.input_row import Row
from llamaq.producer.bulk.output_lines import answer_line
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.submission import build_request
from llamaq.producer.testing import FakeWorker


async def test_a_bad_row_is_an_error_with_its_line_number(redis_url: str, queue: str, tmp_path: Path) -> None:
    url = "/v1/chat/completions"
    rows = Rows(
        tmp_path,
        "{broken",
        {"id": 2, "prompt": "x", "max_token": 5},
        "",
        {"custom_id": "c", "method": "POST", "url": url, "body": {"messages": [], "n": 2}},
        {"id": 5, "prompt": "good"},
        [1],
    )
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.run, client)
    assert (progress.rows_total, progress.rows_done, progress.rows_failed) == (5, 5, 4)
    assert texts(rows.answers()) == [(5, "re: good")]
    broken, unknown, batch, number = sorted(rows.errors(), key=lambda line: line.get("line", 4))
    assert broken["error"]["message"].startswith("line 1: not JSON")
    assert "line 2: max_token: there is no such option; did you mean max_tokens?" in unknown["error"]["message"]
    assert (batch["custom_id"], batch["response"]["status_code"], batch["error"]["line"]) == ("c", 400, 4)
    assert batch["response"]["body"]["error"]["param"] == "messages"
    assert number["error"]["message"] == "line 6: a JSON object is required"


async def test_error_lines_are_json_and_have_the_id_and_the_line(redis_url: str, queue: str, tmp_path: Path) -> None:
    rows = Rows(
        tmp_path,
        '{"id": NaN, "prompt": "x"}',
        '{"id": 1e999, "prompt": "x"}',
        {"id": 1.5, "prompt": "x"},
        {"id": True, "prompt": "x"},
        '{"id": "surrogate", "prompt": "\\ud800"}',
        '{"custom_id": 1e999, "body": {}}',
    )
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
    errors = sorted(rows.errors(), key=lambda line: line["error"].get("line") or line["line"])
    wanted = "id: a text or an integer is required"
    texts = [line["error"]["message"] for line in errors]
    assert texts[0] == "line 1: not JSON: NaN is not a JSON value"
    assert texts[1:4] == [f"line {number}: {wanted}" for number in (2, 3, 4)]
    assert texts[4].startswith("line 5: a text of the request is not valid Unicode")
    assert texts[5] == "line 6: custom_id: a text is required"
    assert [line.get("id") for line in errors[:5]] == [None, None, None, None, "surrogate"]
    assert errors[5]["custom_id"] is None


async def test_a_bad_cell_leaves_the_id_in_the_error_line(redis_url: str, queue: str, tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    run = rows.with_fields(input=tmp_path / "in.csv")
    run.input.write_text('id,messages\na,not JSON\n,"[NaN]"\n')
    async with served_client(redis_url, queue) as (client, _):
        await execute(run, client)
    bad, nameless = rows.errors()
    assert (bad["id"], bad["line"], nameless["id"]) == ("a", 1, None)
    assert bad["error"]["message"].startswith("line 1: column messages: not JSON: ")


async def test_a_row_with_an_unexpected_error_fails_alone(
    redis_url: str,
    queue: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read_body(_endpoint: str, _body: object) -> None:
        raise TypeError("secret prompt")

    async def build(options: Any) -> JobRequest:
        if options["prompt"] == "not a request":
            raise OverflowError("secret prompt")
        return await build_request(options)

    async def write(run: RunParameters, row: Row, results: Sequence[Result], **values: Any) -> bytes:
        if row.number == 3:
            raise UnicodeEncodeError("utf-8", "secret prompt", 0, 1, "not Unicode")
        return await answer_line(run, row, results, **values)

    monkeypatch.setattr(input_row, "read_body", read_body)
    monkeypatch.setattr(execution, "build_request", build)
    monkeypatch.setattr(execution, "answer_line", write)
    rows = Rows(
        tmp_path,
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "not read"}},
        {"id": 2, "prompt": "not a request"},
        {"id": 3, "prompt": "not written"},
        {"id": 4, "prompt": "good"},
    )
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.run, client)
    assert (progress.state, progress.rows_done, progress.rows_failed) == (BulkState.COMPLETED, 4, 3)
    assert texts(rows.answers()) == [(4, "re: good")]
    unread, unbuilt, unwritten = sorted(rows.errors(), key=lambda line: line.get("line", 1))
    assert (unread["custom_id"], unread["error"]["line"]) == ("c", 1)
    assert "TypeError" in unread["error"]["message"]
    assert "OverflowError" in unbuilt["error"]["message"]
    assert unwritten["error"]["code"] == "internal"
    assert sorted(record.getMessage().split()[2] for record in caplog.records if "bulk." in record.getMessage()) == [
        "row=1",
        "row=2",
        "row=3",
    ]
    assert "secret" not in caplog.text


async def test_rows_with_values_that_python_cannot_use_fail_alone(redis_url: str, queue: str, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"logit_bias": [[[1], 2]]},
        {"t_max_predict_ms": 10**400},
        {"user": "\ud800"},
        {"prompt": "\ud800"},
    ]
    lines = [{"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x"} | body} for body in bodies]
    rows = Rows(tmp_path, *lines, {"prompt": "\ud800"}, {"prompt": "good"})
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.run, client)
    assert (progress.state, progress.rows_failed) == (BulkState.COMPLETED, 5)
    assert texts(rows.answers()) == [(6, "re: good")]


async def test_an_id_with_half_a_surrogate_pair_is_the_same_in_both_files(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    """Else the answers of two such rows could not be told apart."""
    rows = Rows(
        tmp_path,
        '{"id": "\\ud83d", "prompt": "one"}',
        '{"id": "\\ud83e", "prompt": "two"}',
        '{"id": "\\ud83f", "prompt": "three", "max_token": 5}',
    )
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
    assert sorted((line["id"], line["text"]) for line in rows.answers()) == [
        ("\ud83d", "re: one"),
        ("\ud83e", "re: two"),
    ]
    assert [line["id"] for line in rows.errors()] == ["\ud83f"]


async def test_a_failed_row_whose_job_is_a_dead_letter_can_be_shown_and_retried(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    """The request was deleted when the error was written. The failed job of another row is still deleted then."""
    rows = Rows(tmp_path, {"prompt": "poison"}, {"prompt": "broken"})
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        running = asyncio.create_task(execute(rows.run, client))
        for _ in range(2):
            attempt = await worker.start_next()
            if attempt.request.prompt == "poison":
                await crash_workers(worker, attempt)
            else:
                await attempt.fail("internal")
        assert (await running).rows_failed == 2
        kinds = [key.decode().split(":")[3] async for key in client.redis.scan_iter(f"*{queue}:0*")]
        assert (kinds.count("job"), kinds.count("key")) == (1, 0)
        (letter,) = await client.dead_letters()
        request = (await client.dead_letter(letter.id)).request
        assert request is not None
        assert request.prompt == "poison"
        await (await client.retry_dead_letter(letter.id)).cancel()
        drop_errors(rows.run)
        async with serving(client):
            progress = await execute(rows.run, client)
    assert (progress.rows_failed, len(rows.answers())) == (0, 2)
