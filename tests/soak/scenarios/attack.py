"""Malformed, oversized, slow and half-closed requests attack the HTTP server: no defect shows, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import httpx
from tests.soak.chaos import seeded_random
from tests.soak.checker import Verdict
from tests.soak.environment import Environment, wait_until
from tests.soak.http_process import HttpProcess, start_http
from tests.soak.report import ROOT, Outcome, ProgressReport
from tests.support.bad_uploads import MAX_FILE_BYTES
from tests.support.http_attack import MAX_BODY_BYTES, PATIENCE_S, Attacker, complaint_about, run_attack, statuses_of

from llamaq.producer import AsyncClient
from llamaq.tools.random_gguf import CHATML, PLAIN, write_model

WIDTH = 40
"""Number of attacks at the same time."""
WARM_UP = 0.25
"""The memory is measured for the first time after this share of the attacks."""
MAX_GROWTH_MB = 40.0
SETTINGS: dict[str, Any] = {"n_parallel": 8, "n_ctx": 512}
"""A small context ends the answers to requests with a large `max_tokens` soon. A request may ask for 128 answers."""
SERVER: dict[str, Any] = {
    "max_body_bytes": MAX_BODY_BYTES,
    "max_file_bytes": MAX_FILE_BYTES,
    "max_files_bytes": 40 * MAX_FILE_BYTES,
    "header_timeout_s": PATIENCE_S,
    "body_timeout_s": PATIENCE_S,
    "response_ttl_s": 600.0,
    "default_max_tokens": 32,
}
SCHEMATHESIS = "LLAMAQ_SCHEMATHESIS"
"""Environment variable with the path of the program `schemathesis`. `make attack-serve` installs it and sets it."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


async def attack(seed: int, report: ProgressReport, *, n_attacks: int = 10_000, n_examples: int = 30) -> Outcome:
    """Attack a server with `n_attacks` connections, and with `n_examples` requests of schemathesis to each endpoint."""
    verdict, started_s = Verdict(), time.monotonic()
    async with Environment(settings=SETTINGS) as environment:
        environment.model = write_model(environment.folder / "chat.gguf", replace(PLAIN, chat_template=CHATML), seed=1)
        await environment.start_ready()
        server = await start_http(environment, **SERVER)
        try:
            figures = await _attack(environment, server, seed, n_attacks, verdict, report)
            figures |= await _run_schemathesis(server, environment, seed, n_examples, verdict)
            async with environment.client() as client:
                await _check_end(client, environment, server, verdict)
        finally:
            server.close()
    verdict.n_jobs = verdict.n_readings = n_attacks
    return Outcome("attack", verdict, figures, time.monotonic() - started_s)


async def _attack(
    environment: Environment, server: HttpProcess, seed: int, n_attacks: int, verdict: Verdict, report: ProgressReport
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        description = (await http.get("/openapi.json")).json()
    attacker = Attacker(description, environment.queue, seeded_random(seed, "attack"))
    kinds: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    begun_mb = 0.0

    async def attack_one_by_one() -> None:
        nonlocal begun_mb
        while kinds.total() < n_attacks:
            drawn = attacker.draw()
            kinds[f"{drawn.kind}, {drawn.ending}"] += 1
            begun_mb = begun_mb or (server.memory_mb if kinds.total() > WARM_UP * n_attacks else 0.0)
            try:
                answer = await run_attack(server.url, drawn)
            except (TimeoutError, OSError) as exc:
                verdict.others.append(f"{exc!r}: {drawn!r}")
                continue
            attacker.learn(answer)
            statuses.update([str(status) for status in statuses_of(answer)] or ["no answer"])
            if (complaint := complaint_about(drawn, answer)) is not None:
                verdict.others.append(complaint)
            report(kinds.total(), n_attacks, "attacks")

    await asyncio.gather(*(attack_one_by_one() for _ in range(WIDTH)))
    await _wait_or_tell(lambda: not server.n_connections, "the server has closed all connections", verdict)
    grown_mb = round(server.memory_mb - begun_mb, 1)
    if grown_mb > MAX_GROWTH_MB:
        verdict.others.append(f"the server has grown by {grown_mb} MB after the warm-up")
    return {
        "kinds": dict(sorted(kinds.items())),
        "statuses": dict(sorted(statuses.items())),
        "memory": {"MB": round(server.memory_mb, 1), "MB more than after the warm-up": grown_mb},
        "connections left": server.n_connections,
    }


async def _run_schemathesis(
    server: HttpProcess, environment: Environment, seed: int, n_examples: int, verdict: Verdict
) -> dict[str, Any]:
    program = os.environ.get(SCHEMATHESIS)
    if not program:
        return {"schemathesis": f"not run: {SCHEMATHESIS} is not set (make attack-serve)"}
    log = ROOT / "build" / "schemathesis.txt"
    log.parent.mkdir(exist_ok=True)
    arguments = ["run", f"{server.url}/openapi.json", "--checks", CHECKS, "--max-examples", str(n_examples)]
    arguments += ["--exclude-path-regex", "embedding|rerank"]  # 501: the worker has none
    arguments += ["--phases", "fuzzing", "--workers", "4", "--request-timeout", "30", "--seed", str(seed), "--no-color"]
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(
            program, *arguments, cwd=environment.folder, stdout=output, stderr=output
        )
        code = await running.wait()
    if code:
        verdict.others.append(f"schemathesis has found failures, see {log}")
    return {"schemathesis": next((line.strip() for line in log.read_text().splitlines() if " generated, " in line), "")}


async def _check_end(client: AsyncClient, environment: Environment, server: HttpProcess, verdict: Verdict) -> None:
    """Check that jobs, slots and keys are released, and that the server still answers."""

    async def is_idle() -> bool:
        depth = await client.queue_depth()
        (worker,) = await client.workers()
        return not depth.waiting and not depth.running and all(slot.job_id is None for slot in worker.slots)

    deadline_s = time.monotonic() + 60
    while not await is_idle():
        if time.monotonic() > deadline_s:
            verdict.others.append(f"jobs or slots are left: {await client.queue_depth()} {await client.workers()}")
            break
        await asyncio.sleep(0.2)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        health = await http.get("/health")
        answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
    if (health.status_code, answer.status_code) != (200, 200):
        verdict.others.append(f"afterwards: {health.status_code} {answer.status_code} {answer.text[:300]}")
    later = cast("list[bytes]", await client.redis.zrange(client.keys.later(client.queue, 0), 0, -1))
    delayed = tuple(b":job:" + job_id for job_id in later)
    async for key in client.redis.scan_iter(count=1000):
        if key.endswith(delayed):
            continue  # a response in the background that waits for its time
        if (b":job:" in key or b":events:" in key or b":http:" in key) and await client.redis.ttl(key) == -1:
            job = await client.redis.hgetall(key) if b":job:" in key else {}
            verdict.others.append(f"a key that never expires: {key.decode(errors='replace')} {job}")
    verdict.others += [
        f"in the log: {line}" for line in server.log.splitlines() if "Traceback" in line or "ERROR" in line
    ]
    if not all(worker.is_running for worker in environment.workers):
        verdict.others.append(f"a worker has died: {environment.workers}")


async def _wait_or_tell(condition: Any, what: str, verdict: Verdict) -> None:
    try:
        await wait_until(condition, what, 30)
    except TimeoutError as exc:
        verdict.others.append(str(exc))
