"""A bulk run writes each row exactly once: after interruptions, for bad rows, and with a full queue."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import BulkRunBusy, BulkRunRefused
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import BulkProgress, BulkRun, BulkState, drop_errors, execute, execution, input_row
from llamaq.producer.bulk.input_row import Row
from llamaq.producer.bulk.output_lines import answer_line
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.streaming import poll_schedule
from llamaq.producer.submission import build_request
from llamaq.producer.testing import FakeWorker


class Rows:
    """A folder with the files of a run."""

    def __init__(self, folder: Path, *rows: object) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        self.input.write_text("".join(f"{line}\n" for line in lines))
        self.run = BulkRun(input=self.input, output=self.output)

    def with_fields(self, **fields: Any) -> BulkRun:
        """Return the run with other fields, validated."""
        return BulkRun(**{**dict(self.run), **fields})

    def answers(self) -> list[Any]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def errors(self) -> list[Any]:
        return [json.loads(line) for line in self.run.error_file.read_text().splitlines()]


class Answers:
    """A fake worker that answers each prompt with itself, and notes the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, request: JobRequest) -> list[str]:
        prompt = request.prompt or (request.messages[-1].content if request.messages else "")
        self.prompts.append(prompt)
        return ["re: ", prompt]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path, *({"id": f"row {n}", "prompt": f"prompt {n}"} for n in range(1, 31)))


@asynccontextmanager
async def serving(client: AsyncClient) -> AsyncIterator[Answers]:
    """Answer the jobs of the client's queue within this context."""
    answers = Answers()
    async with FakeWorker(client.settings.redis_url, client.queue) as worker:
        task = asyncio.create_task(worker.serve(answers))
        yield answers
        await cancel_tasks(task)


@asynccontextmanager
async def served_client(url: str, queue: str) -> AsyncIterator[tuple[AsyncClient, Answers]]:
    async with AsyncClient(url, queue) as client, serving(client) as answers:
        yield client, answers


def texts(answers: list[Any]) -> list[tuple[int, str]]:
    return [(answer["line"], answer["text"]) for answer in answers]


EXPECTED = [(n, f"re: prompt {n}") for n in range(1, 31)]


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


def delete_files(sentence: str) -> None:
    for path in sentence.replace(" and ", ", ").split(", "):
        Path(path).unlink()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
async def test_the_way_out_of_another_input_names_all_files(
    redis_url: str, queue: str, tmp_path: Path, suffix: str
) -> None:
    run = Rows(tmp_path, {"prompt": "good"}, "bad").with_fields(output=tmp_path / f"out.{suffix}")
    async with served_client(redis_url, queue) as (client, _):
        await execute(run, client)
        run.input.write_text('{"prompt": "other"}\n')
        with pytest.raises(BulkRunRefused, match="was begun with another input") as caught:
            await execute(run, client)
        delete_files(str(caught.value).partition(", or delete ")[2])
        again = await execute(run.model_copy(update={"run_id": "another"}), client)
    assert (again.rows_done, again.rows_failed) == (1, 0)


async def test_a_damaged_description_names_all_files(redis_url: str, queue: str, tmp_path: Path) -> None:
    rows = Rows(tmp_path, {"prompt": "good"}, "bad")
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        (tmp_path / "out.jsonl.run.json").write_text("{")
        with pytest.raises(BulkRunRefused, match=r"delete \S+out.jsonl, \S+out.errors.jsonl and \S+run.json "):
            await execute(rows.run, client)


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
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
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


async def test_a_full_queue_slows_the_run_down_and_fails_no_row(redis_url: str, queue: str, rows: Rows) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "3")
        progress = await execute(rows.run, client)
    assert (progress.rows_failed, sorted(texts(rows.answers()))) == (0, EXPECTED)


async def test_the_progress_tells_that_no_worker_serves_the_queue(
    redis_url: str, queue: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "SILENCE_S", 0.0)
    stop, notices = asyncio.Event(), []

    def stop_at_notice(progress: BulkProgress) -> None:
        notices.append(progress.notice)
        if progress.notice:
            stop.set()

    async with AsyncClient(redis_url, queue) as client:
        await execute(rows.run, client, on_progress=stop_at_notice, stop=stop)
    assert any(notice and notice.startswith("no worker serves") for notice in notices)


async def test_a_run_of_another_input_or_with_other_parameters_is_refused(
    redis_url: str, queue: str, rows: Rows, tmp_path: Path
) -> None:
    async with served_client(redis_url, queue) as (client, _):
        await execute(rows.run, client)
        with pytest.raises(BulkRunRefused, match="other values of options"):
            await execute(rows.with_fields(options={"temperature": 0.5}), client)
        rows.input.write_text(rows.input.read_text().replace("prompt 3", "prompt x"))
        with pytest.raises(BulkRunRefused, match="another input"):
            await execute(rows.run, client)
        with pytest.raises(BulkRunRefused, match="no such file"):
            await execute(rows.with_fields(input=tmp_path / "missing.jsonl"), client)
        foreign = tmp_path / "foreign.jsonl"
        foreign.write_text("{}\n")
        with pytest.raises(BulkRunRefused, match="is not of a bulk run"):
            await execute(rows.with_fields(output=foreign), client)
    assert foreign.read_text() == "{}\n"


async def test_a_run_that_another_process_executes_is_refused(redis_url: str, queue: str, rows: Rows) -> None:
    async with AsyncClient(redis_url, queue) as client:
        running = asyncio.create_task(execute(rows.run, client))
        while not (await client.queue_depth()).waiting:  # noqa: ASYNC110  # Redis has no event for it
            await asyncio.sleep(0.01)
        with pytest.raises(BulkRunBusy):
            await execute(rows.run, client)
        running.cancel()
        await asyncio.wait([running])
        assert not (await client.queue_depth()).waiting  # the jobs of a cancelled call are cancelled


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


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
async def test_tables_are_read_and_written(redis_url: str, queue: str, tmp_path: Path, suffix: str) -> None:
    table, copy = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    records = [{"id": f"row {n}", "prompt": f"prompt {n}", "max_tokens": 5, "note": "ignored"} for n in range(1, 6)]
    _write_table(table, records)
    run = BulkRun(input=table, output=copy, ordered=True)
    async with served_client(redis_url, queue) as (client, _):
        progress = await execute(run, client)
    assert (progress.rows_total, progress.rows_failed) == (5, 0)
    written = _read_table(copy)
    assert [(int(row["line"]), row["id"], row["text"]) for row in written] == [
        (n, f"row {n}", f"re: prompt {n}") for n in range(1, 6)
    ]


def _write_table(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        lines = ["id,prompt,max_tokens,note", *(",".join(str(value) for value in row.values()) for row in records)]
        path.write_text("\n".join(lines) + "\n")
        return
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(records), path)


def _read_table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    table: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return table
