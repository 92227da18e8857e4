"""Measures how many jobs a Redis with an append-only file loses when it is killed, and when the power fails.

    python -m tests.soak.aof_loss            # one line of JSON for each mode; takes some seconds

One client submits jobs as fast as possible until the server is killed by SIGKILL at a random moment. A job is lost if
its submit was acknowledged but the restarted server does not have it. After a kill, the file has all data that the
process has written. After a power cut, it may have only the data up to the last sync. So a shim around `fdatasync`
records the length of the file at each sync. To simulate a power cut, the file is truncated to the last recorded length
before the restart. Disks that acknowledge a sync before it is complete are not simulated.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tests.support.ports import reserve_port
from tests.support.redis_servers import Server

from llamaq.common.protocol.keys import Keys
from llamaq.producer import AsyncClient

ROUNDS = 10
SUBMITTERS = 16
RUN_S = (1.5, 3.0)
AOF = "appendonly.aof"

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int fdatasync(int fd) {
  static int (*real)(int);
  static int note = -1;
  struct stat before;
  int result;
  if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  if (note < 0) note = open(getenv("SYNCED_TO"), O_WRONLY | O_CREAT, 0600);
  fstat(fd, &before);
  result = real(fd);
  if (result == 0) pwrite(note, &before.st_size, 8, 0);
  return result;
}
"""


class Acknowledged:
    """Acknowledged jobs, and the time of each acknowledgement."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}

    async def submit_until_unreachable(self, client: AsyncClient) -> None:
        """Submit one job after the other until Redis does not reply."""
        with suppress(RedisError, OSError):
            while True:
                job = await client.submit("x" * 200, max_tokens=1)
                self.at_s[job.id] = time.monotonic()


async def lost_jobs(url: str, acknowledged: Acknowledged) -> list[str]:
    """Return the acknowledged jobs that Redis has lost."""
    async with AsyncClient(url, "aof") as client, client.redis.pipeline(transaction=False) as pipe:
        for job_id in acknowledged.at_s:
            pipe.exists(Keys().of_job(job_id).job)
        known = await pipe.execute()
    return [job_id for job_id, is_known in zip(acknowledged.at_s, known, strict=True) if not is_known]


def run_round(folder: Path, mode: str, shim: Path, *, power_cut: bool, run_s: float) -> dict[str, float]:
    """Submit jobs, kill the server, restart it, and return the figures of this round."""
    synced_to = folder / "synced"
    options = ("--save", "", "--appendonly", "yes", "--appendfsync", mode, "--aof-load-truncated", "yes")
    environment = {"LD_PRELOAD": str(shim), "SYNCED_TO": str(synced_to)}
    server = Server(folder, reserve_port(), options, environment=environment)
    server.start()
    url = f"redis://127.0.0.1:{server.port}/0"
    acknowledged = Acknowledged()

    async def load() -> None:
        async with AsyncClient(url, "aof") as client:
            submitters = [asyncio.create_task(acknowledged.submit_until_unreachable(client)) for _ in range(SUBMITTERS)]
            await asyncio.sleep(run_s)
            await asyncio.to_thread(server.kill)
            await asyncio.gather(*submitters)

    asyncio.run(load())
    killed_s = max(acknowledged.at_s.values())
    if power_cut:
        with (folder / str(server.port) / AOF).open("r+b") as file:
            file.truncate(int.from_bytes(synced_to.read_bytes(), sys.byteorder))
    server.start()
    lost = asyncio.run(lost_jobs(url, acknowledged))
    server.kill()
    ages_s = [killed_s - acknowledged.at_s[job_id] for job_id in lost]
    return {"n": len(acknowledged.at_s), "per_s": len(acknowledged.at_s) / run_s, "lost": len(lost),
            "oldest_lost_s": max(ages_s, default=0.0)}  # fmt: skip


def main() -> None:
    """Measure each mode of `appendfsync`, with a kill and with a power cut."""
    seeded_random = random.Random(1)
    folder = Path(tempfile.mkdtemp(prefix="aof-"))
    try:
        (folder / "shim.c").write_text(SHIM)
        shim = folder / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, folder / "shim.c", "-ldl"], check=True)
        for mode in ("always", "everysec"):
            for power_cut in (False, True):
                rounds = [
                    run_round(folder, mode, shim, power_cut=power_cut, run_s=seeded_random.uniform(*RUN_S))
                    for _ in range(ROUNDS)
                ]
                figures: dict[str, Any] = {
                    "appendfsync": mode,
                    "end": "power cut" if power_cut else "SIGKILL",
                    "rounds": len(rounds),
                    "acknowledged": int(sum(one["n"] for one in rounds)),
                    "lost": int(sum(one["lost"] for one in rounds)),
                    "most_lost_in_a_round": int(max(one["lost"] for one in rounds)),
                    "oldest_lost_s": round(max(one["oldest_lost_s"] for one in rounds), 2),
                    "submits_per_s": round(statistics.median(one["per_s"] for one in rounds)),
                }
                sys.stdout.write(json.dumps(figures) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
