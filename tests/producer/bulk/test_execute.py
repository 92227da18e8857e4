"""A bulk run writes each row exactly once: also after interruptions, and with a full queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.bulk_runs import EXPECTED, Rows, served_client, serving, texts

from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkProgress, BulkRun, BulkState, drop_errors, execute, execution, input_file
from llamaq.producer.streaming import poll_schedule
from llamaq.producer.testing import FakeWorker


async def test_each_row_is_answered_in_the_form_of_its_request(redis_url: str, queue: str, tmp_path: Path) -> None:
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    rows = Rows(
        tmp_path,
        {"id": "p", "prompt": "plain"},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": "text"}},
    )
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.with_fields(ordered=True), client)
    assert (progress.state, progress.rows_done, progress.rows_failed) == (BulkState.COMPLETED, 3, 0)
    assert progress.generated_tokens == 6
    plain, chatted, completed = rows.answers()
    assert (plain["id"], plain["text"], plain["finish_reason"]) == ("p", "re: plain", "stop")
    body = chatted["response"]["body"]
    assert (chatted["custom_id"], chatted["response"]["status_code"], chatted["error"]) == ("c", 200, None)
    assert (body["object"], body["model"]) == ("chat.completion", "small")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "re: hi"}
    assert body["usage"]["completion_tokens"] == 2
    assert completed["response"]["body"]["choices"][0]["text"] == "re: text"
    assert not rows.run.error_file.exists()


async def test_a_stopped_run_continues_and_computes_no_row_twice(redis_url: str, queue: str, rows: Rows) -> None:
    stop = asyncio.Event()

    def stop_soon(progress: BulkProgress) -> None:
        if progress.rows_done:
            stop.set()

    async with served_client(redis_url, queue) as (client, answers):
        run = rows.with_fields(window=2)
        first = await execute(run.model_copy(update={"rate": 4.0}), client, on_progress=stop_soon, stop=stop)
        assert first.state is BulkState.STOPPED
        n_first = len(rows.answers())
        assert 0 < n_first < 30
        with rows.output.open("a") as file:
            file.write('{"line": 30, "id": "row 30", "text": "torn')
        second = await execute(run.model_copy(update={"ordered": True}), client)
        assert (second.state, second.rows_before, second.rows_done) == (BulkState.COMPLETED, n_first, 30)
        third = await execute(run, client)
        assert (third.rows_before, third.generated_tokens) == (30, 0)
    assert texts(rows.answers()) == EXPECTED
    # At most the jobs in flight, which the stop has cancelled, have a second job.
    assert len(answers.prompts) <= 30 + 2


async def test_jobs_that_a_killed_process_left_in_the_queue_are_not_computed_again(
    redis_url: str, queue: str, rows: Rows
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        for number in range(1, 31):  # a process that was killed before it wrote any answer
            key = f"{rows.run.run_id}:{number}"
            await client.submit(f"prompt {number}", idempotency_key=key, priority="bulk", stream=False)
        async with serving(client) as answers:
            await execute(rows.run, client)
    assert sorted(texts(rows.answers())) == EXPECTED
    assert len(answers.prompts) == 30


async def test_a_cancelled_job_of_an_earlier_process_is_computed_again(redis_url: str, queue: str, rows: Rows) -> None:
    async with AsyncClient(redis_url, queue) as client:
        key = f"{rows.run.run_id}:7"
        job = await client.submit("prompt 7", idempotency_key=key, priority="bulk", stream=False)
        await job.cancel()
        async with serving(client):
            progress = await execute(rows.run, client)
    assert (progress.rows_failed, sorted(texts(rows.answers()))) == (0, EXPECTED)


async def test_jobs_that_redis_has_lost_are_submitted_again(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(poll_schedule, "WAITING_SILENCE_S", 0.2)  # a lost job is noticed by a look at its hash
    async with AsyncClient(redis_url, queue) as client:
        running = asyncio.create_task(execute(rows.run, client))
        while (await client.queue_depth()).waiting < 30:  # noqa: ASYNC110  # Redis has no event for it
            await asyncio.sleep(0.01)
        keys = [key async for key in client.redis.scan_iter(f"*{queue}:0*")]
        await client.redis.delete(*keys)
        async with serving(client):
            await running
    assert sorted(texts(rows.answers())) == EXPECTED
    assert not caplog.text  # a warning for each job would fill the terminal


async def test_a_full_queue_slows_the_run_down_and_fails_no_row(redis_url: str, queue: str, rows: Rows) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "3")
        progress = await execute(rows.run, client)
    assert (progress.rows_failed, sorted(texts(rows.answers()))) == (0, EXPECTED)


@pytest.mark.parametrize("mode", ["open", "paused"])
async def test_the_progress_tells_that_no_worker_serves_the_queue_or_that_it_is_paused(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(execution, "SILENCE_S", 0.0)
    stop, notices = asyncio.Event(), []

    def stop_at_notice(progress: BulkProgress) -> None:
        notices.append(progress.notice)
        if progress.notice:
            stop.set()

    async with AsyncClient(redis_url, queue) as client, AsyncExitStack() as exits:
        if mode == "paused":
            await client.pause()
            worker = await exits.enter_async_context(FakeWorker(redis_url, queue))
            await worker.announce()
        await execute(rows.run, client, on_progress=stop_at_notice, stop=stop)
    expected = {"open": "no worker serves", "paused": f"queue '{queue}' is paused"}
    assert any(notice and notice.startswith(expected[mode]) for notice in notices)


async def test_a_run_stops_after_too_many_errors_and_at_its_deadline(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    rows = Rows(tmp_path, *(["bad"] * 50), {"prompt": "good"})
    async with AsyncClient(redis_url, queue) as client:
        progress = await execute(rows.with_fields(max_errors=3, window=1), client)
        assert (progress.state, progress.rows_failed < 50) == (BulkState.TOO_MANY_ERRORS, True)
        late = rows.with_fields(deadline=datetime.now(UTC) - timedelta(seconds=1))
        assert (await execute(late, client)).state is BulkState.DEADLINE
    assert drop_errors(rows.run) == progress.rows_failed
    assert not rows.run.error_file.exists()


async def test_the_progress_has_the_highest_row_number_with_blank_lines(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    rows = Rows(tmp_path, "", "", {"prompt": "good"}, "")
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(rows.run, client)
    assert (progress.rows_total, progress.last_row) == (1, 3)


async def test_a_run_with_too_many_errors_continues_and_counts_from_0(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    """Each continuation stopped at once, because it counted the errors of the earlier processes."""
    rows = Rows(tmp_path, *(["bad"] * 4), {"prompt": "good"})
    run = rows.with_fields(max_errors=3)
    async with AsyncClient(redis_url, queue) as client:
        assert (await execute(run, client)).state is BulkState.TOO_MANY_ERRORS
        async with serving(client):
            progress = await execute(run, client)
    assert (progress.state, progress.rows_done, progress.rows_failed) == (BulkState.COMPLETED, 5, 4)


async def test_the_results_in_the_output_are_deleted_from_redis(redis_url: str, queue: str, rows: Rows) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        kinds = {key.decode().split(":")[3] async for key in client.redis.scan_iter(f"*{queue}:0*")}
    assert not {"job", "events", "key"} & kinds


async def test_a_row_has_the_same_random_seed_after_an_interruption(redis_url: str, queue: str, rows: Rows) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        seeds = {answer["line"]: answer["seed"] for answer in rows.answers()}
        rows.output.unlink()  # the description of the run remains
        await execute(rows.run, client)
    assert {answer["line"]: answer["seed"] for answer in rows.answers()} == seeds
    assert len(set(seeds.values())) == 30


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["stopped", "cancelled"])
async def test_a_run_can_be_stopped_while_its_input_is_read(
    redis_url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """A large table is read for minutes. Ctrl-C had to wait for the end."""
    n_rows, n_read, has_ended = 3_000_000, 0, threading.Event()

    def many_rows(_: object) -> Iterator[list[str]]:
        nonlocal n_read
        try:
            yield ["prompt"]
            while n_read < n_rows:
                n_read += 1
                yield ["x"]
        finally:
            has_ended.set()

    monkeypatch.setattr(input_file, "_csv_rows", many_rows)
    source = tmp_path / "in.csv"
    source.write_text("prompt\nx\n")
    run, stop = BulkRun(input=source, output=tmp_path / "out.jsonl"), asyncio.Event()
    async with AsyncClient(redis_url, queue) as client:
        running = asyncio.create_task(execute(run, client, stop=stop))
        while not n_read:  # noqa: ASYNC110  # a thread reads
            await asyncio.sleep(0.001)
        if is_cancelled:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            stop.set()
            assert (await running).state is BulkState.STOPPED
        assert await asyncio.to_thread(has_ended.wait, 60)
    assert n_read < n_rows
    assert not run.output.exists()
