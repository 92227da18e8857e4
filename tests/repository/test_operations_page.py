"""The commands of docs/operations.md run as they are written, and print what their comments say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaq.producer import AsyncClient
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


def commands() -> list[str]:
    (block,) = re.findall(r"<!-- test: watch -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
        depth, interactive, bulk, consumers, workers, dead, policy, memory, persistence = (
            run(command, own_redis.url, free_port) for command in commands()
        )
    assert json.loads("".join(depth)) == {"waiting": 2, "running": 1, "delayed": 0, "mode": "open"}
    assert (interactive, bulk, workers, dead) == (["1"], ["2"], ["1"], ["0"])
    assert consumers[consumers.index("fake") + 1 :][:2] == ["pending", "1"]
    assert policy == ["maxmemory-policy", "noeviction"]
    assert [line.partition(":")[0] for line in memory] == ["used_memory_human", "maxmemory_human"]
    assert persistence == ["aof_enabled:1", "aof_last_write_status:ok"]
