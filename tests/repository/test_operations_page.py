"""The commands of docs/operations.md run as they are written, and print what their comments say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.redis_servers import Server

from llamaq.producer import AsyncClient, Priority
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis, find_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operations.md"
QUEUE = "default"


@pytest.fixture
def own_redis(free_port: int) -> Iterator[EmbeddedRedis]:
    """A Redis of its own, because the commands of the page name the queue `default`."""
    with EmbeddedRedis(port=free_port) as server:
        yield server


def commands(section: str) -> list[str]:
    (block,) = re.findall(rf"<!-- test: {section} -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block).splitlines()


def run(command: str, url: str, port: int) -> list[str]:
    """Run a command as a shell does whose `redis-cli` uses the given port, and return its lines."""
    folders = [Path(sys.executable).parent, find_server().parent]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    done = subprocess.run(
        ["bash", "-c", f'redis-cli() {{ command redis-cli -p {port} "$@"; }}\nset -o pipefail\n{command}'],
        env=inherited | {"LLAMAQ_REDIS_URL": url, "PATH": ":".join([*map(str, folders), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout.replace("\r", "").splitlines()


async def test_the_commands_that_watch_a_queue_print_its_jobs_workers_and_settings(
    own_redis: EmbeddedRedis, free_port: int
) -> None:
    async with AsyncClient(own_redis.url, QUEUE) as client, FakeWorker(own_redis.url, QUEUE) as worker:
        for priority in ("bulk", "bulk", "interactive"):
            await client.submit("one", priority=priority)
        await worker.announce()
        await worker.start_next()
        depth, consumers, workers, dead, policy, memory, persistence = (
            run(command, own_redis.url, free_port) for command in commands("watch")
        )
    assert json.loads("".join(depth)) == {"waiting": 2, "running": 1, "delayed": 0, "mode": "open", "tenants": []}
    assert (workers, dead) == (["1"], ["0"])
    assert consumers[consumers.index("fake") + 1 :][:2] == ["pending", "1"]
    assert policy == ["maxmemory-policy", "noeviction"]
    assert [line.partition(":")[0] for line in memory] == ["used_memory_human", "maxmemory_human"]
    assert persistence == ["aof_enabled:1", "aof_last_write_status:ok"]


async def test_the_depth_of_a_queue_is_read_with_plain_redis_cli(own_redis: EmbeddedRedis, free_port: int) -> None:
    async with AsyncClient(own_redis.url, QUEUE) as client, FakeWorker(own_redis.url, QUEUE) as worker:
        bulk_ids = [(await client.submit("one", priority="bulk")).id for _ in range(3)]
        await worker.start_next()
        assert await worker.claim() is not None
        await client.submit("one", priority="interactive")
        await client.submit("one", delay_s=1000)
        await client.submit("one", priority="bulk", tenant="acme")
        await client.pause()
        interactive, bulk, claimed, delayed, mode, oldest, tenants, of_tenant, twice, partitions, total = (
            run(command, own_redis.url, free_port) for command in commands("depth")
        )
        entries: Any = await client.redis.xrange(client.keys.jobs(QUEUE, 0, Priority.BULK))
    assert (interactive, bulk, delayed, mode) == (["1"], ["4"], ["1"], ["paused"])
    assert (twice, partitions, total) == (["4", "4"], ["4"], ["5"])
    assert (tenants, of_tenant) == (["acme"], ["1"])
    assert claimed[0] == "2"
    assert dict(zip(claimed[3::2], claimed[4::2], strict=True)) == {"fake": "1", "waiting": "1"}
    assert oldest[:3] == [entries[0][0].decode(), "id", bulk_ids[0]]


async def test_a_backup_has_the_jobs_and_a_new_redis_reads_it(
    own_redis: EmbeddedRedis, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with AsyncClient(own_redis.url, QUEUE) as client, FakeWorker(own_redis.url, QUEUE) as worker:
        ran = await client.submit("one")
        await (await worker.start_next()).emit([1, 2], "one two")
        waited = await client.submit("two")
        (command,) = commands("backup")
        run(command, own_redis.url, free_port)
    own_redis.stop()
    server = Server(tmp_path, free_port, ("--appendonly", "no"))
    (tmp_path / str(free_port)).mkdir()
    (tmp_path / "backup.rdb").rename(tmp_path / str(free_port) / "dump.rdb")
    try:
        server.start()
        async with AsyncClient(own_redis.url, QUEUE) as client:
            assert {job.job_id for job in await client.jobs()} == {ran.id, waited.id}
            assert await client.purge() == (waited.id,)
            assert await client.job(ran.id).cancel()
            assert (await client.job(ran.id).status()).generated_tokens == 2
    finally:
        server.kill()


def test_the_messages_of_the_log_exist() -> None:
    (table,) = re.findall(r"<!-- test: log -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    names = re.findall(r"`((?:[a-z_]+|…)\.[a-z_]+)`", table)
    assert len(names) > 15
    sources = "".join(
        path.read_text() for folder in ("common", "worker", "producer") for path in (ROOT / folder).rglob("*.py")
    )
    for name in names:  # a component of the worker stands in place of "…"
        assert re.search(rf'"(%s\.)?{re.escape(name.removeprefix("…."))}', sources), name
