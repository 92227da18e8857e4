"""The commands for a queue, with a fake worker."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from typing import Any

import pytest
from tests.support.command_line import failing, llamaq
from tests.support.fake_redis import replace_redis
from tests.support.worker_cards import KilledWorker
from typer.testing import CliRunner

from llamaq.cli.main import build_app
from llamaq.producer import AsyncClient, Client, FinishReason, JobSummary, Priority, QueueStats, QueueSummary, Worker
from llamaq.producer.testing import FakeWorker


def test_snapshots_are_tables_for_people_and_json_for_programs(served: str) -> None:
    llamaq("generate", "one two three")
    assert llamaq("depth") == "0 waiting, 0 running\n"
    assert served in llamaq("queues"), "it has a worker"
    found = json.loads(llamaq("depth", "--json"))
    assert found == {"waiting": 0, "running": 0, "delayed": 0, "mode": "open", "tenants": []}
    assert "fake" in llamaq("workers")
    assert Worker.model_validate_json(llamaq("workers", "--json")).card.queue == served
    table = llamaq("stats")
    assert served in table
    assert "last jobs" in table
    assert QueueStats.model_validate_json(llamaq("stats", "--json")).recent[0].stats.generated_tokens == 3


def test_health_requires_a_worker_on_this_host_with_a_recent_tick(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--redis-url", redis_url, "--queue", queue, "--max-age-s", "30"]
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options, code=4)
    assert "no worker serves" in failing(monkeypatch, capsys, "health", *options, "--any", code=4)

    def announce(**heartbeat: Any) -> None:
        async def send_heartbeat() -> None:
            async with KilledWorker(redis_url, queue) as worker:
                await worker.announce(**heartbeat)

        asyncio.run(send_heartbeat())

    now_ms = int(time.time() * 1000)
    announce(now_ms=now_ms)
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options, code=4)
    assert llamaq("health", *options, "--any") == f"ok: fake serves {queue}\n"
    announce(now_ms=now_ms, host=socket.gethostname())
    assert llamaq("health", *options) == f"ok: fake serves {queue}\n"
    assert json.loads(llamaq("health", *options, "--json"))["worker"] == "fake"
    announce(now_ms=now_ms, host=socket.gethostname(), tick_age_ms=40_000)
    assert "the last tick of fake is 4" in failing(monkeypatch, capsys, "health", *options)
    announce(now_ms=now_ms - 60_000, host=socket.gethostname())
    assert "the last tick of fake is 6" in failing(monkeypatch, capsys, "health", *options)


def test_health_without_a_name_checks_the_queues_of_the_workers_on_this_host(
    queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = replace_redis(monkeypatch)  # no other test has a worker there
    monkeypatch.delenv("LLAMAQ_QUEUE", raising=False)
    options = ["--redis-url", url, "--max-age-s", "30"]
    assert f"({socket.gethostname()}) serves any queue" in failing(monkeypatch, capsys, "health", *options, code=4)

    async def announce(queue: str, host: str, tick_age_ms: int = 0) -> None:
        async with KilledWorker(url, queue, name=f"worker-of-{queue}") as worker:
            await worker.announce(now_ms=int(time.time() * 1000), host=host, tick_age_ms=tick_age_ms)

    here = socket.gethostname()
    asyncio.run(announce("elsewhere", "another-host"))
    asyncio.run(announce(queue, here))
    assert llamaq("health", *options) == f"ok: worker-of-{queue} serves {queue}\n"
    monkeypatch.setenv("LLAMAQ_QUEUE", "elsewhere")
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options, code=4)
    monkeypatch.delenv("LLAMAQ_QUEUE")
    asyncio.run(announce(queue, here, tick_age_ms=40_000))
    assert f"the last tick of worker-of-{queue} is 4" in failing(monkeypatch, capsys, "health", *options)


@pytest.fixture
def selected(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A queue without a worker that the commands use by default."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setenv("LLAMAQ_KEY_PREFIX", queue)  # so that `llamaq queues` does not list the queues of other tests
    return queue


def test_an_empty_table_says_what_is_missing(selected: str) -> None:
    assert llamaq("queues") == "no queue has a job or a worker\n"
    assert llamaq("jobs") == f"queue {selected!r} has no waiting or running job\n"
    assert llamaq("jobs", "--priority", "bulk") == f"queue {selected!r} has no waiting or running job that matches\n"
    missing = f"no worker serves queue {selected!r}; start one with: llamaq worker --queue {selected}\n"
    assert llamaq("workers") == missing
    assert llamaq("stats").endswith(f"{missing}\nno job of this queue has ended\n")
    assert llamaq("dead", "list") == f"queue {selected!r} has no dead letters\n"


def test_queues_lists_a_mistyped_queue_and_hides_empty_ones(redis_url: str, selected: str) -> None:
    with Client(redis_url, "mistyped", key_prefix=selected) as client:
        job = client.submit("x")
    header, row = llamaq("queues").splitlines()
    assert header.split() == ["queue", "waiting", "running", "workers", "mode", "oldest", "model"]
    assert re.fullmatch(r"mistyped +1 +0 +0 +open +[0-9]+s +-", row)
    assert QueueSummary.model_validate_json(llamaq("queues", "--json")).waiting == 1
    assert llamaq("cancel", job.id) == "cancelled\n"
    assert "no queue" in llamaq("queues")
    assert "mistyped" in llamaq("queues", "--all")


def test_jobs_prints_whole_ids_and_filters(redis_url: str, selected: str) -> None:
    with Client(redis_url, key_prefix=selected) as client:
        first = client.submit("x", metadata={"user": 42})
        second = client.submit("x", priority=Priority.BULK)
    rows = llamaq("jobs").splitlines()
    assert rows[0].split() == ["job", "state", "priority", "age", "attempt"]
    assert {tuple(row.split()[:3]) for row in rows[1:]} == {
        (first.id, "queued", "interactive"),
        (second.id, "queued", "bulk"),
    }
    for options, job in ((["--metadata", "user=42"], first), (["--priority", "bulk"], second)):
        assert JobSummary.model_validate_json(llamaq("jobs", "--json", *options)).job_id == job.id
    assert len(llamaq("jobs", "--limit", "1", "--json").splitlines()) == 1
    assert llamaq("jobs", "--state", "running", "--json") == llamaq("jobs", "--older-than-s", "60", "--json") == ""


def test_jobs_and_depth_show_jobs_that_are_not_due(redis_url: str, selected: str) -> None:
    with Client(redis_url, key_prefix=selected) as client:
        job_id = client.submit("x", delay_s=1000, retries=3).id
    assert llamaq("depth") == "0 waiting, 0 running, 1 delayed\n"
    assert llamaq("jobs").splitlines()[1].split()[:2] == [job_id, "delayed"]
    status = json.loads(llamaq("status", job_id, "--json"))
    assert (status["state"], status["retries_left"]) == ("queued", 3)
    assert status["run_at_ms"] > status["submitted_ms"]


def test_purge_asks_first_and_cancels_what_matches(redis_url: str, selected: str) -> None:
    with Client(redis_url, key_prefix=selected) as client:
        jobs = [client.submit("x", metadata={"user": user}) for user in ("a", "b", "b")]
        runner = CliRunner()
        assert llamaq("purge", "--dry-run") == "3 waiting jobs would be cancelled\n"
        asked = runner.invoke(build_app("purge"), ["purge", "--metadata", "user=b"], input="n\n")
        assert asked.exit_code == 1
        assert f"Cancel 2 waiting jobs of queue {selected!r}?" in asked.stderr
        unanswered = runner.invoke(build_app("purge"), ["purge"], input="")
        assert unanswered.exit_code == 130
        assert client.queue_depth().waiting == 3
        agreed = runner.invoke(build_app("purge"), ["purge", "--metadata", "user=b"], input="y\n")
        assert agreed.stdout.endswith("cancelled 2 waiting jobs\n")
        assert client.job(jobs[1].id).result().finish_reason is FinishReason.CANCELLED
        assert [job.job_id for job in client.jobs()] == [jobs[0].id]
        purged = json.loads(llamaq("purge", "--yes", "--json"))
        assert purged == {"queue": selected, "jobs": [jobs[0].id], "dry_run": False}
        unasked = runner.invoke(build_app("purge"), ["purge"], input="")
        assert (unasked.exit_code, unasked.stdout, unasked.stderr) == (0, "cancelled 0 waiting jobs\n", "")
    assert runner.invoke(build_app("purge"), ["purge", "--metadata", "user"]).exit_code == 2


def test_the_jobs_of_a_tenant_are_listed_and_purged(redis_url: str, selected: str) -> None:
    with Client(redis_url, key_prefix=selected, tenant="a") as client:
        own = client.submit("x")
        client.submit("x", tenant="b")
        rows = llamaq("jobs").splitlines()
        assert "tenant" in rows[0]
        assert [json.loads(row)["tenant"] for row in llamaq("jobs", "--json").splitlines()] == ["a", "b"]
        assert own.id in llamaq("jobs", "--tenant", "a")
        assert "no waiting or running job that matches" in llamaq("jobs", "--tenant", "c")
        assert json.loads(llamaq("status", own.id, "--json"))["position"] == 0
        assert llamaq("purge", "--yes", "--tenant", "a") == "cancelled 1 waiting job\n"
        assert [job.tenant for job in client.jobs()] == ["b"]


def test_a_queue_is_paused_drained_and_resumed(
    redis_url: str, selected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(redis_url, selected, key_prefix=selected) as client:
        client.submit("x")
    assert llamaq("pause") == f"queue {selected}: 1 waiting, 0 running, paused\n"
    assert llamaq("depth") == "1 waiting, 0 running, paused\n"
    assert " paused " in llamaq("queues")
    assert llamaq("stats").startswith(f"queue {selected}: 1 waiting, 0 running, paused\n")
    assert json.loads(llamaq("drain", "--json"))["mode"] == "draining"
    monkeypatch.setattr("llamaq.cli.job_commands.check_worker", lambda client: None)
    assert f"llamaq resume --queue {selected}" in failing(monkeypatch, capsys, "submit", "x", code=4)
    assert llamaq("resume") == f"queue {selected}: 1 waiting, 0 running\n"
    assert llamaq("depth") == "1 waiting, 0 running\n"


def test_stats_shows_the_id_and_the_end_of_the_last_jobs(redis_url: str, selected: str) -> None:
    async def run() -> list[str]:
        async with (
            AsyncClient(redis_url, selected, key_prefix=selected) as client,
            FakeWorker(redis_url, selected, key_prefix=selected) as worker,
        ):
            jobs = [await client.submit("x") for _ in range(2)]
            await (await worker.start_next()).answer(["a"])
            await (await worker.start_next()).fail("prompt_too_long", "4,000 tokens")
            return [job.id for job in jobs]

    finished, failed = asyncio.run(run())
    lines = llamaq("stats").splitlines()
    header = next(line for line in lines if line.startswith("end"))
    first, second = lines[lines.index(header) + 1 :]
    assert (first.split()[0], first.split()[-1]) == ("prompt_too_long", failed)
    assert (second.split()[0], second.split()[-1]) == ("stop", finished)
    assert header.index("job") <= 80, "the columns before the id fit into a terminal"
