"""A Redis user may not run some commands. Jobs have no fault then, and no key is stored without an expiry."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError
from tests.support.job_claims import claims_of, worker_queue

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol import codec
from llamaq.common.protocol.end_expired_jobs import end_expired
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_scripts import JobScripts
from llamaq.common.protocol.script_types import Claimant, JobEntry
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.producer import AsyncClient, AsyncJob
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker.command_inbox import CommandInbox
from llamaq.worker.broker.job_streams import JobStreams
from llamaq.worker.local.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.starts_processes
REFUSAL = "can't run this command|has no permissions to run"  # Redis 6.2, and newer


@pytest.fixture
def server() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


def url_of_worker(server: str) -> str:
    return f"{server}?username=worker&password=secret"


async def allow(client: AsyncClient, *rules: str) -> None:
    """Set the permissions of the worker's user."""
    redis: Any = client.redis
    user = ("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
    await redis.execute_command(*user)


async def claim_of(worker: FakeWorker) -> JobEntry:
    claim = await worker.claim()
    assert claim is not None
    return claim


async def test_a_job_that_may_not_be_claimed_is_no_dead_letter(server: str) -> None:
    async with AsyncClient(server) as client:
        job = await client.submit("hello")
        await allow(client, "-hincrby")
        async with FakeWorker(url_of_worker(server), "default") as worker:
            claims = claims_of(worker)
            claim = await claim_of(worker)
            with pytest.raises(ResponseError, match=REFUSAL):
                await claims.claim_job(claim)
            assert (await job.status()).state is JobState.QUEUED
            assert await client.dead_letters() == ()
            await allow(client)
            assert await claims.claim_job(claim) is not None


async def test_the_deadline_of_a_job_that_may_not_be_ended_stays(server: str) -> None:
    async with AsyncClient(server) as client:
        jobs: list[AsyncJob] = [await client.submit("late", deadline_s=0.01) for _ in range(2)]
        ids = [job.id.encode() for job in jobs]
        await allow(client, "-zadd")
        async with FakeWorker(url_of_worker(server), "default") as worker:
            scripts = JobScripts(worker.redis, worker.keys)
            with pytest.raises(ResponseError, match=REFUSAL):
                await end_expired(worker.redis, scripts, worker.keys, "default", 0, ids)
            await allow(client)
            await end_expired(worker.redis, scripts, worker.keys, "default", 0, ids)
        assert [(await job.result(timeout=10)).finish_reason for job in jobs] == [FinishReason.DEADLINE] * 2


# ---- a key and its expiry are stored together, even if the server dies after the first command


NO_EXPIRY = ("-expire", "-pexpire")


class Handler:
    """Replies to each command."""

    async def execute(self, _: SlotCommand) -> SlotReply:
        return SlotReply()


async def test_a_command_is_not_stored_without_an_expiry(server: str) -> None:
    async with AsyncClient(server) as client:
        await allow(client, *NO_EXPIRY)
        async with FakeWorker(server, "default") as worker, AsyncClient(url_of_worker(server)) as limited:
            await worker.announce()
            with pytest.raises(NoPermissionError):
                await limited.slots()
            assert await client.redis.exists(client.keys.slot_commands(worker.name)) == 0


async def test_a_reply_is_not_stored_without_an_expiry(server: str) -> None:
    async with AsyncClient(server) as client:
        await allow(client, *NO_EXPIRY)
        command = SlotCommand.model_validate({"id": secrets.token_hex(16), "action": "list", "deadline_ms": 2**50})
        async with FakeWorker(url_of_worker(server), "default") as limited:
            task = asyncio.create_task(CommandInbox(limited.redis, limited.keys, limited.name, Handler()).run())
            await client.redis.rpush(client.keys.slot_commands(limited.name), codec.encode_model(command))
            while not await client.redis.acl_log():  # noqa: ASYNC110  # in Redis
                await asyncio.sleep(0.01)
            await cancel_tasks(task)
        assert await client.redis.exists(client.keys.reply(command.id)) == 0


async def test_the_end_of_a_wait_is_not_stored_without_an_expiry(server: str) -> None:
    async with AsyncClient(server) as client:
        await allow(client, *NO_EXPIRY)
        async with FakeWorker(url_of_worker(server), "default") as limited:
            streams = JobStreams(worker_queue(limited), Claimant("w1", 60_000))
            await streams.open()
            await streams.end_wait()
        assert [key async for key in client.redis.scan_iter("*:wake:*")] == []
