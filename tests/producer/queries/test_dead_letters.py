"""The dead letters as an operator sees them: listed, shown, tried again, thrown away; by client and command."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from llamaq.cli import views
from llamaq.cli.main import build_app, main
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails
from llamaq.common.protocol.keys import JobId
from llamaq.producer import (
    AsyncClient,
    Client,
    DeadLetterNotFound,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    JobState,
    QueueFull,
)
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.inbox import Inbox


async def poison(client: AsyncClient, worker: FakeWorker, prompt: str = "poison", **options: Any) -> str:
    """Submit a job that makes two tokens and then is what three workers die of; returns its id."""
    job = await client.submit(prompt, **options)
    first = await worker.start_next()
    await first.emit([7, 8], "two tokens")
    await worker.scripts.requeue(first.claim, first.number)
    for name in ("a", "b", "c"):
        await worker.scripts.start(first.claim, name)
        await worker.scripts.check_crash(
            first.claim, "heir", last_worker=name, heartbeat_ms=0, dead_after_s=1, max_crashes=3
        )
    assert (await job.status()).state is JobState.FAILED
    return job.id


async def bury_garbage(worker: FakeWorker) -> None:
    """Have a worker find an entry that names no job."""
    inbox = Inbox(worker.redis, worker.keys, queue=worker.queue, partitions=1, worker_id="w", lease_s=10, max_crashes=3)
    await inbox.open(max_queue=0)
    await worker.redis.xadd(worker.keys.of_job(str(JobId.new(worker.queue))).bulk, {"id": "nonsense"})
    assert await inbox.claim(1, block_s=0.01) == []
    await inbox.close()


async def test_dead_letters_are_listed_newest_first_with_their_reason(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        assert await client.dead_letters() == ()
        first = await poison(client, worker)
        second = await poison(client, worker)
        await bury_garbage(worker)
        garbage, *jobs = await client.dead_letters()
        assert [letter.id for letter in jobs] == [letter.job_id for letter in jobs] == [second, first]
        assert {letter.workers for letter in jobs} == {("a", "b", "c")}
        assert garbage.job_id is None
        assert garbage.id == f"{queue}.0.{garbage.entry}"
        assert "not a job id" in garbage.reason
        assert garbage.dead_ms >= jobs[0].dead_ms >= jobs[1].dead_ms


async def test_a_dead_letter_shows_the_request_and_what_was_generated(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job_id = await poison(client, worker, "what kills", seed=5, metadata={"user": "u"})
        letter = await client.dead_letter(job_id)
        assert letter.request is not None
        assert (letter.request.prompt, letter.request.seed, letter.request.metadata) == ("what kills", 5, {"user": "u"})
        assert (letter.text, letter.tokens) == ("two tokens", (7, 8))
        await bury_garbage(worker)
        (garbage, _) = await client.dead_letters()
        shown = await client.dead_letter(garbage.id)
        assert shown.request is None
        assert "nonsense" in shown.held


async def test_retry_submits_a_new_job_with_the_same_request_and_takes_the_letter_out(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        options: dict[str, Any] = {"seed": 5, "metadata": {"user": "u"}, "priority": "bulk", "max_tokens": 9}
        old = await poison(client, worker, idempotency_key="key", **options)
        job = await client.retry_dead_letter(old)
        assert job.id != old
        attempt = await worker.start_next()
        assert attempt.claim.job_id == job.id
        request = attempt.request
        assert (request.prompt, request.seed, request.metadata) == ("poison", 5, {"user": "u"})
        assert (request.priority, request.max_tokens, request.idempotency_key) == ("bulk", 9, None)
        assert attempt.stored == 0, "it begins anew"
        await attempt.answer(["fine"])
        assert (await job.result(timeout=5)).text == "fine"

        assert await client.dead_letters() == ()
        with pytest.raises(DeadLetterNotFound):
            await client.retry_dead_letter(old)
        with pytest.raises(JobFailed):
            await client.job(old).result(timeout=5)
        assert 0 < await client.redis.pttl(client.keys.of_job(old).job) <= 60_000
        assert (await client.submit("x", idempotency_key="key")).id == old, "the key is the old job's, while it lives"


async def test_two_who_retry_at_once_submit_one_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        old = await poison(client, worker)
        outcomes = await asyncio.gather(*(client.retry_dead_letter(old) for _ in range(20)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)} <= {DeadLetterNotFound}
        assert len({job.id for job in outcomes if not isinstance(job, BaseException)}) == 1
        assert (await client.queue_depth()).waiting == 1


async def test_what_cannot_be_retried_says_why_and_stays(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        old = await poison(client, worker)
        await worker.redis.hset(client.keys.config(queue, 0), "max_queue", "1")
        in_the_way = await client.submit("in the way")
        with pytest.raises(QueueFull):
            await client.retry_dead_letter(old)
        await in_the_way.cancel()
        await worker.redis.delete(client.keys.of_job(old).job)
        with pytest.raises(JobNotFound):
            await client.retry_dead_letter(old)
        assert (await client.dead_letter(old)).request is None
        await bury_garbage(worker)
        garbage, _ = await client.dead_letters()
        with pytest.raises(InvalidRequest, match="is not a job"):
            await client.retry_dead_letter(garbage.id)
        assert len(await client.dead_letters()) == 2


async def test_what_is_purged_is_gone_and_its_job_expires_like_any_other(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, result_ttl_s=60) as client, FakeWorker(redis_url, queue) as worker:
        old = await poison(client, worker)
        await bury_garbage(worker)
        for letter in await client.dead_letters():
            await client.purge_dead_letter(letter.id)
            with pytest.raises(DeadLetterNotFound, match="retried or purged"):
                await client.purge_dead_letter(letter.id)
        assert await client.dead_letters() == ()
        keys = client.keys.of_job(old)
        assert [0 < await client.redis.pttl(key) <= 60_000 for key in (keys.job, keys.events)] == [True, True]


async def test_an_id_that_is_none_is_an_error_of_its_own(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        for letter_id in (str(JobId.new(queue)), f"{queue}.0.1-1"):
            with pytest.raises(DeadLetterNotFound):
                await client.dead_letter(letter_id)
        for letter_id in ("nonsense", f"{queue}.0.+", f"{queue}.0.1-1 ", ""):
            with pytest.raises(InvalidRequest):
                await client.dead_letter(letter_id)


# ---- the command


@pytest.fixture
def letters(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A job that workers died of, and an entry that was no job, on the queue that the environment names."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setattr(views.console, "width", 200)  # it read COLUMNS when it was imported

    async def prepare() -> list[str]:
        async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
            await poison(client, worker, "what kills")
            await bury_garbage(worker)
            return [letter.id for letter in reversed(await client.dead_letters())]

    return asyncio.run(prepare())


def llamaq(*args: str) -> str:
    result = CliRunner().invoke(build_app(args[0]), args, catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def test_the_command_lists_and_shows(letters: list[str]) -> None:
    job_id, garbage = letters
    table = llamaq("dead", "list")
    assert job_id in table
    assert "3 workers died with this job" in table
    assert garbage in table
    listed = [DeadLetter.model_validate_json(line) for line in llamaq("dead", "list", "--json").splitlines()]
    assert [letter.id for letter in listed] == [garbage, job_id]
    shown = llamaq("dead", "show", job_id)
    assert "what kills" in shown
    assert "a b c" in shown
    assert "two tokens" in shown
    assert "nonsense" in llamaq("dead", "show", garbage)
    details = DeadLetterDetails.model_validate_json(llamaq("dead", "show", job_id, "--json"))
    assert details.request is not None
    assert details.request.prompt == "what kills"


def test_the_command_retries_and_prints_the_new_id(letters: list[str], redis_url: str, queue: str) -> None:
    job_id, garbage = letters
    new_id = llamaq("dead", "retry", job_id).strip()
    assert json.loads(llamaq("status", new_id, "--json"))["state"] == "queued"
    assert llamaq("dead", "retry", "--all") == ""
    with Client(redis_url, queue) as client:
        assert [letter.id for letter in client.dead_letters()] == [garbage]


def test_the_command_retries_and_purges_all(letters: list[str]) -> None:
    new_id = llamaq("dead", "retry", "--all").strip()
    assert new_id not in letters
    assert llamaq("dead", "purge", letters[1]) == ""
    assert llamaq("dead", "purge", "--all") == ""
    assert llamaq("dead", "list", "--json") == ""


def test_the_command_says_what_is_wrong_in_one_line(
    letters: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, complaint in (
        (["retry", letters[1]], "is not a job"),
        (["show", letters[0][:-1] + "x"], "not a job id"),
        (["purge", letters[0][:-4] + "0000"], "no dead letter"),
    ):
        monkeypatch.setattr(sys, "argv", ["llamaq", "dead", *args])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (1, "", 1)
        assert complaint in err


@pytest.mark.parametrize("args", [["retry"], ["purge"], ["purge", "x", "--all"]])
def test_retry_and_purge_want_one_id_or_all(args: list[str]) -> None:
    result = CliRunner().invoke(build_app("dead"), ["dead", *args])
    assert result.exit_code == 2
    assert "--all" in result.stderr


def test_the_client_for_threads_does_the_same(letters: list[str], redis_url: str, queue: str) -> None:
    job_id, garbage = letters
    with Client(redis_url, queue) as client:
        assert [letter.id for letter in client.dead_letters()] == [garbage, job_id]
        assert client.dead_letter(job_id).text == "two tokens"
        job = client.retry_dead_letter(job_id)
        assert job.is_new
        assert job.status().state is JobState.QUEUED
        client.purge_dead_letter(garbage)
        assert client.dead_letters() == ()
