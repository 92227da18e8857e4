"""Batches of two HTTP servers that are killed and stopped at random, while Redis is full at times."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
from tests.soak.chaos import seeded_random
from tests.soak.checker import Verdict
from tests.soak.environment import Environment
from tests.soak.http_process import HttpProcess, start_http
from tests.soak.report import Outcome, ProgressReport
from tests.soak.scenarios.rows import ROW_WORKER

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys

ENDPOINT = "/v1/completions"
LEASE_S = 2.0
LONGEST_S = 3600.0
FULL_S = 1.0
FAULTS = ("kill", "kill", "stop", "full")
SETTINGS: dict[str, Any] = {"batch_lease_s": LEASE_S, "max_files_bytes": 1 << 30}


class Servers:
    """Two servers of one queue. One that was killed is started again."""

    def __init__(self, environment: Environment, running: list[HttpProcess]) -> None:
        self._environment = environment
        self._running = running
        self.peak_mb = 0.0

    @classmethod
    async def start(cls, environment: Environment) -> Servers:
        """Start both."""
        return cls(environment, [await start_http(environment, **SETTINGS) for _ in range(2)])

    def measure(self) -> None:
        """Note the memory that the larger one holds."""
        with suppress(OSError, StopIteration):
            self.peak_mb = max(self.peak_mb, *(each.memory_mb for each in self._running))

    async def disturb(self, fault: str, rng: random.Random) -> None:
        """Kill or stop one of them, or let Redis be full for a while."""
        index = rng.randrange(2)
        if fault == "kill":
            self._running[index].kill()
            self._running[index] = await start_http(self._environment, **SETTINGS)
        elif fault == "stop":
            process = self._running[index].process
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2 * LEASE_S)
            process.send_signal(signal.SIGCONT)
        else:
            async with self._environment.client() as client:
                await client.redis.config_set("maxmemory", "1mb")
                await asyncio.sleep(FULL_S)
                await client.redis.config_set("maxmemory", "0")

    async def get(self, path: str) -> httpx.Response:
        """Return an answer of one that lives and answers."""
        return await self._ask("GET", path)

    async def post(self, path: str, **content: Any) -> Any:
        """Return the decoded answer to a POST request."""
        return (await self._ask("POST", path, **content)).json()

    async def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        deadline_s = time.monotonic() + LONGEST_S
        for number in range(10**9):
            async with httpx.AsyncClient(base_url=self._running[number % 2].url, timeout=60) as http:
                with suppress(httpx.TransportError):
                    answer = await http.request(method, path, **content)
                    if answer.status_code < 500:
                        return answer
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        raise TimeoutError(f"no server answers {path}")

    async def begin(self, lines: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Upload a file, begin its batch, and return the path of the batch."""
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"})
        batch = await self.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": ENDPOINT, **fields})
        return f"/v1/batches/{batch['id']}"

    def close(self) -> None:
        """Let both end."""
        for server in self._running:
            server.close()


async def batches(seed: int, report: ProgressReport, *, n_lines: int = 50_000, n_faults: int = 12) -> Outcome:
    """Run a batch through a fake worker while faults occur, and then cancel one and let one expire."""
    verdict, rng, started_s = Verdict(), seeded_random(seed, "batches"), time.monotonic()
    async with Environment() as environment:
        worker = subprocess.Popen([sys.executable, ROW_WORKER, environment.redis_url, environment.queue])  # noqa: ASYNC220
        servers = await Servers.start(environment)
        try:
            figures = await _run_whole(servers, verdict, rng, report, n_lines, n_faults)
            worker.kill()
            worker.wait()
            for ending in ("cancelled", "expired"):
                await _end_early(environment, servers, verdict, rng, ending)
        finally:
            servers.close()
            worker.kill()
            worker.wait()
    verdict.n_jobs = verdict.n_readings = n_lines
    return Outcome("batches", verdict, figures, time.monotonic() - started_s)


def _lines(count: int) -> list[dict[str, Any]]:
    """Return lines whose answers are their prompts. Each tenth asks for three answers, each hundredth is not valid."""
    lines = []
    for number in range(count):
        body: dict[str, Any] = {"prompt": f"question {number} {'x' * (number % 997)}"}
        body |= {"n": 3} if number % 10 == 3 else {"n": 0} if number % 100 == 7 else {}
        lines.append({"custom_id": str(number), "url": ENDPOINT, "body": body})
    return lines


async def _run_whole(
    servers: Servers, verdict: Verdict, rng: random.Random, report: ProgressReport, n_lines: int, n_faults: int
) -> dict[str, Any]:
    lines = _lines(n_lines)
    path, begun_s = await servers.begin(lines), time.monotonic()
    faults: Counter[str] = Counter()
    places = sorted(rng.sample(range(n_lines), n_faults))
    while True:
        batch = (await servers.get(path)).json()
        servers.measure()
        n_done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        report(n_done, n_lines, "lines")
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            break
        if places and n_done >= places[0]:
            fault = rng.choice(FAULTS)
            faults[fault] += 1
            del places[0]
            await servers.disturb(fault, rng)
        await asyncio.sleep(0.2)
    taken_s = time.monotonic() - begun_s
    await _check_whole(servers, verdict, batch, lines)
    return {
        "lines per s": round(n_lines / taken_s, 1),
        "faults": dict(faults),
        "peak MB of a server": round(servers.peak_mb, 1),
    }


async def _check_whole(
    servers: Servers, verdict: Verdict, batch: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> None:
    """Check that each line is answered once, and that the numbers of the batch are those of its files."""
    counts: Counter[str] = Counter()
    n_failed = 0
    for name in ("output_file_id", "error_file_id"):
        file = await servers.get(f"/v1/files/{batch[name]}")
        content = (await servers.get(f"/v1/files/{batch[name]}/content")).content
        if file.json()["bytes"] != len(content):
            verdict.others.append(f"{name}: {file.json()['bytes']} bytes are announced, {len(content)} were read")
        for each in map(json.loads, content.splitlines()):
            counts[each["custom_id"]] += 1
            body = lines[int(each["custom_id"])]["body"]
            if name == "error_file_id":
                n_failed += 1
                is_right = body.get("n") == 0
            else:
                texts = [choice["text"] for choice in each["response"]["body"]["choices"]]
                is_right = texts == [body["prompt"]] * body.get("n", 1)
            if not is_right:
                verdict.others.append(f"a wrong line in {name}: {str(each)[:300]}")
    wrong = [line["custom_id"] for line in lines if counts[line["custom_id"]] != 1]
    if wrong:
        verdict.others.append(f"{len(wrong)} lines are not answered once: {wrong[:10]}")
    shown = batch["request_counts"]
    if (batch["status"], shown["completed"], shown["failed"]) != ("completed", len(lines) - n_failed, n_failed):
        verdict.others.append(f"the batch shows {batch['status']} {shown}, {n_failed} lines have failed")


async def _end_early(
    environment: Environment, servers: Servers, verdict: Verdict, rng: random.Random, ending: str
) -> None:
    """End a batch whose jobs no worker computes, while its server is killed. None of its jobs may be left."""
    path = await servers.begin(_lines(50), completion_window="1m" if ending == "expired" else "24h")
    jobs = Keys("llamaq").jobs(environment.queue, 0, Priority.BULK)
    async with environment.client() as client:
        while not await client.redis.xlen(jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if ending == "cancelled":
            await servers.post(f"{path}/cancel")
        for _ in range(2):
            await servers.disturb("kill", rng)
        batch = await _ended(servers, path)
        n_left = await client.redis.xlen(jobs)
    if (batch["status"], n_left) != (ending, 0):
        verdict.others.append(f"{ending}: the batch is {batch['status']}, {n_left} jobs are left")
    n_failed = 50 if ending == "expired" else 0
    if batch["request_counts"]["failed"] < n_failed:
        verdict.others.append(f"{ending}: {batch['request_counts']}")


async def _ended(servers: Servers, path: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        batch: dict[str, Any] = (await servers.get(path)).json()
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{path} does not end")
