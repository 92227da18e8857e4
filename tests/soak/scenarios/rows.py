"""Bulk runs: every row is answered once in bounded memory, even when all processes are killed at random."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tests.soak.chaos import seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.report import Outcome, ProgressReport
from tests.soak.scenarios.outages import DURABLE
from tests.support.ports import reserve_port
from tests.support.redis_servers import Server

from llamaq.producer.bulk import BulkRun
from llamaq.producer.rq import BulkQueue
from llamaq.producer.rq.run_status import ENDED
from llamaq.tools.demo_model.fact_questions import INLINE_FRAMES, recall_probe

ROW_WORKER = Path(__file__).parents[1] / "row_worker.py"
FEW_ROWS = 1000
MOST_GROWTH_MB = 60.0
"""How much more memory a run of many rows may need than one of `FEW_ROWS`, at its peak."""
ANSWER_TOKENS = 12
DISTANCE_WORDS = 40
POLL_S = 0.05
LONGEST_S = 1800.0


class CommandRun:
    """A run of `llamaq bulk run`. A killed process is started again."""

    part = "bulk process"

    def __init__(self, environment: Environment, source: Path, target: Path) -> None:
        self._arguments = (environment, source, target, *GREEDY)
        self._process = start_run(*self._arguments)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = start_run(*self._arguments)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class RqRun:
    """A run that an RQ worker executes. Kills hit the RQ worker, its work-horse, or both."""

    part = "RQ worker"

    def __init__(self, environment: Environment, source: Path, target: Path) -> None:
        self._environment = environment
        self._runs = BulkQueue(environment.redis_url)
        run = BulkRun(
            input=source, output=target, options={"temperature": 0, "max_tokens": ANSWER_TOKENS, "stop": "\n"}
        )
        self._run_id = self._runs.submit(run, queue=environment.queue).run_id
        self._worker = self._start_worker()
        self._n_kills = 0

    def _start_worker(self) -> subprocess.Popen[bytes]:
        with (self._environment.folder / "rq.log").open("ab") as log:
            command = [sys.executable, "-m", "llamaq", "bulk", "worker", "--redis-url", self._environment.redis_url]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._environment.folder)

    def kill(self) -> None:
        self._n_kills += 1
        children = Path(f"/proc/{self._worker.pid}/task/{self._worker.pid}/children").read_text().split()
        if self._n_kills % 3 != 1:  # otherwise the work-horse notices the death of its RQ worker
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
        if self._n_kills % 3 != 2:
            self._worker.kill()
            self._worker.wait()
            self._worker = self._start_worker()

    def has_ended(self) -> bool:
        with suppress(RedisError):
            return self._runs.status(self._run_id).state in ENDED
        return False

    def close(self) -> None:
        self._runs.redis.close()
        self._worker.terminate()
        self._worker.wait()


async def many_rows(seed: int, report: ProgressReport, *, n_rows: int = 100_000) -> Outcome:
    """Run a few rows, then many, through a fake worker. Compare the answers with the rows, and the peaks of memory."""
    checker, started_s, figures = Checker(), time.monotonic(), {}
    async with Environment() as environment:
        worker = _start_fake_worker(environment)
        try:
            peaks = {}
            for count in (FEW_ROWS, n_rows):
                rows = [{"id": f"row {n}", "prompt": f"question {n}: {'x' * (n % 997)}"} for n in range(1, count + 1)]
                source = _write_rows(environment.folder / f"{count}.jsonl", rows)
                target = environment.folder / f"{count}.out.jsonl"
                begun_s = time.monotonic()
                run = start_run(environment, source, target)
                peaks[count] = await _peak_mb(run, partial(_report_size, report, target, count))
                _compare(checker, [(n, row["prompt"]) for n, row in enumerate(rows, start=1)], _answers(target))
                figures[f"rows per s, {count} rows"] = round(count / (time.monotonic() - begun_s), 1)
                figures[f"peak MB, {count} rows"] = round(peaks[count], 1)
        finally:
            worker.kill()
            worker.wait()
    if peaks[n_rows] - peaks[FEW_ROWS] > MOST_GROWTH_MB:
        checker.add_violation(f"{n_rows} rows need {peaks[n_rows] - peaks[FEW_ROWS]:.0f} MB more than {FEW_ROWS}")
    return Outcome("many_rows", checker.judge(), figures, time.monotonic() - started_s)


async def row_kills(seed: int, report: ProgressReport, *, n_rows: int = 2000, n_kills: int = 10) -> Outcome:
    """Run rows through the demo model twice: undisturbed, and while processes are killed. Compare the answers."""
    return await compare_runs("row_kills", CommandRun, seed, report, n_rows, n_kills)


async def rq_kills(seed: int, report: ProgressReport, *, n_rows: int = 2000, n_kills: int = 10) -> Outcome:
    """The same as `row_kills`, with a run that an RQ worker executes."""
    return await compare_runs("rq_kills", RqRun, seed, report, n_rows, n_kills)


async def compare_runs(
    name: str, kind: type[CommandRun | RqRun], seed: int, report: ProgressReport, n_rows: int, n_kills: int
) -> Outcome:
    """Compare the answers of an undisturbed run with those of a run while processes are killed."""
    checker, rng, started_s = Checker(), seeded_random(seed, name), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        server = Server(Path(folder), reserve_port(), DURABLE)
        server.start()
        try:
            url = f"redis://127.0.0.1:{server.port}/0"
            async with Environment(redis_url=url, settings={"lease_s": 2.0, "n_parallel": 8}) as environment:
                probes = [recall_probe(rng.getrandbits(32), DISTANCE_WORDS, INLINE_FRAMES[1]) for _ in range(n_rows)]
                rows = [{"id": n, "prompt": probe.prompt} for n, probe in enumerate(probes, start=1)]
                source = _write_rows(environment.folder / "rows.jsonl", rows)
                calm, killed = environment.folder / "calm.jsonl", environment.folder / "killed.jsonl"
                await environment.start_ready()
                begun_s = time.monotonic()
                run = start_run(environment, source, calm, *GREEDY)
                await _until_end(lambda: run.poll() is not None, lambda: report(_n_lines(calm), 2 * n_rows, "rows"))
                calm_s = time.monotonic() - begun_s
                disturbed = kind(environment, source, killed)
                kills = await _run_under_kills(environment, server, disturbed, killed, n_rows, n_kills, rng, report)
                expected = [(line, text) for line, text in _answers(calm)]
                _compare(checker, expected, _answers(killed))
                if len(expected) != n_rows:
                    checker.add_violation(f"the undisturbed run has {len(expected)} rows of {n_rows}")
        finally:
            server.kill()
    right = sum(
        text.strip() == probe.answer.strip() for (_, text), probe in zip(sorted(expected), probes, strict=False)
    )
    figures = {
        "kills": kills,
        "rows per s, undisturbed": round(n_rows / calm_s, 1),
        "rows per s, with kills": round(n_rows / (time.monotonic() - begun_s - calm_s), 1),
        "right answers undisturbed": f"{right} of {n_rows}",
    }
    return Outcome(name, checker.judge(), figures, time.monotonic() - started_s)


GREEDY = ("--temperature", "0", "--max-tokens", str(ANSWER_TOKENS), "--stop", "\n")


async def _run_under_kills(
    environment: Environment,
    server: Server,
    run: CommandRun | RqRun,
    target: Path,
    n_rows: int,
    n_kills: int,
    rng: random.Random,
    report: ProgressReport,
) -> dict[str, int]:
    """Kill a part at random each time that a share of the rows is done. Return the number of kills by part."""
    parts = (run.part, "worker", "Redis")
    kills = dict.fromkeys(parts, 0)
    plan = [parts[number % len(parts)] for number in range(n_kills)]
    rng.shuffle(plan)
    moments = sorted(rng.randrange(n_rows * 9 // 10) for _ in plan)
    try:
        for moment, part in zip(moments, plan, strict=True):
            while _n_lines(target) < moment and not run.has_ended():  # noqa: ASYNC110 - it reads a file
                await asyncio.sleep(POLL_S)
            kills[part] += 1
            report(n_rows + _n_lines(target), 2 * n_rows, f"rows, {sum(kills.values())} kills")
            if part == run.part:
                run.kill()
            elif part == "worker":
                environment.living[0].kill()
                await environment.start_ready()
            else:
                server.kill()
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await asyncio.to_thread(server.start)
        await _until_end(run.has_ended, lambda: report(n_rows + _n_lines(target), 2 * n_rows, "rows"))
    finally:
        run.close()
    return kills


def _start_fake_worker(environment: Environment) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, ROW_WORKER, environment.redis_url, environment.queue])


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start_run(environment: Environment, source: Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(target), *options]
    command += ["--redis-url", environment.redis_url, "--queue", environment.queue]
    with (environment.folder / "bulk.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=environment.folder)


async def _until_end(has_ended: Callable[[], bool], report: Callable[[], None]) -> None:
    """Wait until a run has ended. Raises `TimeoutError` after `LONGEST_S`."""
    deadline_s = time.monotonic() + LONGEST_S
    while not has_ended():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a bulk run has not ended within {LONGEST_S:.0f} s")
        await asyncio.sleep(POLL_S)
        report()


async def _peak_mb(run: subprocess.Popen[bytes], report: Callable[[], None]) -> float:
    """Wait until a run has ended, and return the largest memory that it had."""
    peak_kb = 0
    while (code := run.poll()) is None:
        peak_kb = max(peak_kb, _peak_kb(run.pid))
        await asyncio.sleep(POLL_S)
        report()
    if code:
        raise RuntimeError(f"a bulk run ended with {code}")
    return peak_kb / 1024


def _peak_kb(pid: int) -> int:
    """Return the largest memory that a process has had. 0: the process has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return max((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), default=0)


def _n_lines(path: Path) -> int:
    """Return the number of rows in an output file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _report_size(report: ProgressReport, target: Path, count: int) -> None:
    report(_n_kilobytes(target), count, "kB")


def _n_kilobytes(path: Path) -> int:
    return path.stat().st_size // 1000 if path.exists() else 0


def _answers(path: Path) -> list[tuple[int, str]]:
    with path.open() as file:
        return [(answer["line"], answer["text"]) for answer in map(json.loads, file)]


def _compare(checker: Checker, expected: list[tuple[int, str]], answers: list[tuple[int, str]]) -> None:
    """Add a violation if not each row has its answer exactly once."""
    lines = [line for line, _ in answers]
    if len(set(lines)) != len(lines):
        checker.add_violation(f"{len(lines) - len(set(lines))} rows were written twice")
    found, wanted = dict(answers), dict(expected)
    missing = wanted.keys() - found.keys()
    wrong = [line for line in wanted.keys() & found.keys() if wanted[line] != found[line]]
    if missing:
        checker.add_violation(f"{len(missing)} rows are missing, such as {min(missing)}")
    if wrong:
        line = min(wrong)
        checker.add_violation(f"{len(wrong)} rows differ, such as {line}: {found[line]!r} and not {wanted[line]!r}")
