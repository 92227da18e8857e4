"""Streams are read through HTTP servers while their worker and then their server are killed: no text is lost."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from tests.soak.chaos import seeded_random
from tests.soak.checker import Verdict
from tests.soak.environment import Environment, WorkerProcess, wait_until
from tests.soak.http_process import HttpProcess, start_http
from tests.soak.report import Outcome, ProgressReport

N_STREAMS = 4
"""Number of streams at the same time. All are read from one server, and run in one worker."""
N_NUMBERS = 60
N_CHARS = 3 * N_NUMBERS - 1
"""Number of characters of each text: numbers of two digits, with spaces between."""
TICK_S = 0.01
LATEST_KILL = 0.9
"""The worker and the server are killed before this share of the text was read."""
READ_TIMEOUT_S = 60.0
SETTINGS: dict[str, Any] = {"n_parallel": N_STREAMS, "lease_s": 1.0}


async def serve(seed: int, report: ProgressReport, *, n_rounds: int = 50) -> Outcome:
    """Run rounds. In each, a worker and a server are killed at random moments, and the streams continue at another."""
    verdict, rng, started_s = Verdict(), seeded_random(seed, "serve"), time.monotonic()
    resumed: list[int] = []
    async with Environment(settings=SETTINGS) as environment:
        (worker,) = await environment.start_ready(1, {"tick_s": TICK_S})
        first, second = [await start_http(environment) for _ in range(2)]
        try:
            for number in range(n_rounds):
                streams = [_Stream(f"{number}-{each}", rng) for each in range(N_STREAMS)]
                killed = asyncio.create_task(_kill_worker_and_server(environment, worker, first, streams, rng))
                await asyncio.gather(*(stream.read(first.url, second.url) for stream in streams))
                worker = await killed
                first, second = second, await start_http(environment)
                verdict.others += [complaint for stream in streams for complaint in stream.complaints()]
                resumed += [stream.n_resumed_at for stream in streams if stream.n_resumed_at is not None]
                verdict.n_jobs += N_STREAMS
                report(number + 1, n_rounds, "rounds")
        finally:
            first.close()
            second.close()
    verdict.n_readings = verdict.n_jobs + len(resumed)
    figures = {
        "workers killed": n_rounds,
        "servers killed": n_rounds,
        "streams resumed": len(resumed),
        "resumed before the first text": sum(not at for at in resumed),
        "resumed within the text": sum(0 < at < N_CHARS for at in resumed),
    }
    return Outcome("serve", verdict, figures, time.monotonic() - started_s)


async def _kill_worker_and_server(
    environment: Environment, worker: WorkerProcess, server: HttpProcess, streams: Sequence[_Stream], rng: random.Random
) -> WorkerProcess:
    """Kill a worker and a server at random places of the streams. Return the worker that replaces the first."""

    async def some_text() -> None:
        n_chars = rng.uniform(0, LATEST_KILL * N_CHARS * N_STREAMS)
        await wait_until(lambda: sum(stream.n_chars for stream in streams) >= n_chars, f"{n_chars} characters")

    async def kill_server() -> None:
        await some_text()
        server.kill()

    killing = asyncio.create_task(kill_server())
    await some_text()
    worker.kill()
    (replacement,) = await environment.start_ready(1, {"tick_s": TICK_S})
    await killing
    return replacement


class _Stream:
    """A stream of one response, whose text is known before: its grammar allows no other."""

    def __init__(self, key: str, rng: random.Random) -> None:
        self._key = key
        self._expected = " ".join(str(rng.randint(10, 99)) for _ in range(N_NUMBERS))
        self._text = ""
        self._last = -1
        self._id = ""
        self._final: dict[str, Any] = {}
        self.n_resumed_at: int | None = None
        """The number of characters that were read before the server died. None: it lived long enough."""

    async def read(self, first_url: str, second_url: str) -> None:
        """Read the response from the first server, and when that dies, the rest from the second one."""
        async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
            try:
                await self._follow(self._begin(http, first_url))
            except httpx.TransportError:
                self.n_resumed_at = self.n_chars
                await self._follow(self._resume(http, second_url) if self._id else self._begin(http, second_url))

    @property
    def n_chars(self) -> int:
        """The number of characters that were read so far."""
        return len(self._text)

    def complaints(self) -> list[str]:
        """Return what is wrong with the text."""
        found = []
        if self._text != self._expected:
            found.append(f"stream {self._key}: {self._text!r} instead of {self._expected!r}, {self.n_resumed_at=}")
        output = self._final.get("output") or [{"content": [{"text": None}]}]
        if output[-1]["content"][0]["text"] != self._expected:
            found.append(f"stream {self._key}: its last event has another text: {self._final}")
        return found

    def _begin(self, http: httpx.AsyncClient, url: str) -> Any:
        grammar = f'root ::= "{self._expected}"'
        body = {"input": "Count", "grammar": grammar, "stream": True, "background": True}
        # If the first server dies before it has sent the id of the response, the second one finds it by this key.
        return http.stream("POST", f"{url}/v1/responses", json=body, headers={"Idempotency-Key": self._key})

    def _resume(self, http: httpx.AsyncClient, url: str) -> Any:
        params: dict[str, Any] = {"stream": "true", "starting_after": self._last}
        return http.stream("GET", f"{url}/v1/responses/{self._id}", params=params)

    async def _follow(self, request: Any) -> None:
        async with request as answer:
            async for event in _events_of(answer):
                if event["sequence_number"] <= self._last:
                    continue  # a second server that has begun anew sends the first events again
                self._last = event["sequence_number"]
                if event["type"] == "response.output_text.delta":
                    self._text += event["delta"]
                if "response" in event:
                    self._id = event["response"]["id"]
                    self._final = event["response"]


async def _events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
