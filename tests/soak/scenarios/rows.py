"""Bulk runs: every row is answered once in bounded memory, also when all processes are killed at random."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.soak.chaos import seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import Environment
from tests.soak.report import Outcome, ProgressReport
from tests.soak.scenarios.outages import DURABLE
from tests.support.redis_servers import Server, free_ports

from llamaq.tools.demo_model.fact_questions import INLINE_FRAMES, recall_probe

ROW_WORKER = Path(__file__).parents[1] / "row_worker.py"
FEW_ROWS = 1000
MOST_GROWTH_MB = 60.0
"""How much more memory a run of many rows may need than one of `FEW_ROWS`, at its peak."""
ANSWER_TOKENS = 12
DISTANCE_WORDS = 40
POLL_S = 0.05
LONGEST_S = 1800.0
PARTS = ("bulk process", "worker", "Redis")


async def many_rows(seed: int, report: ProgressReport, *, n_rows: int = 100_000) -> Outcome:
    """Run a few rows, then many, through a fake worker. Compare the answers with the rows, and the peaks of memory."""
    checker, started_s, figures = Checker(), time.monotonic(), {}
    async with Environment() as environment:
        worker = subprocess.Popen([sys.executable, ROW_WORKER, environment.redis_url, environment.queue])
        try:
            peaks = {}
            for count in (FEW_ROWS, n_rows):
                rows = [{"id": f"row {n}", "prompt": f"question {n}: {'x' * (n % 997)}"} for n in range(1, count + 1)]
                source = _write_rows(environment.folder / f"{count}.jsonl", rows)
                target = environment.folder / f"{count}.out.jsonl"
                begun_s = time.monotonic()
                run = _start_run(environment, source, target)
                peaks[count] = await _peak_mb(
                    run, lambda count=count, target=target: report(_n_kilobytes(target), count, "kB")
                )
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
    checker, rng, started_s = Checker(), seeded_random(seed, "row_kills"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        server = Server(Path(folder), free_ports(1)[0], DURABLE)
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
                run = _start_run(environment, source, calm, *_GREEDY)
                await _until_end(run, lambda: report(_n_lines(calm), 2 * n_rows, "rows"))
                calm_s = time.monotonic() - begun_s
                kills = await _run_under_kills(environment, server, source, killed, n_rows, n_kills, rng, report)
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
    return Outcome("row_kills", checker.judge(), figures, time.monotonic() - started_s)


_GREEDY = ("--temperature", "0", "--max-tokens", str(ANSWER_TOKENS), "--stop", "\n")


async def _run_under_kills(
    environment: Environment,
    server: Server,
    source: Path,
    target: Path,
    n_rows: int,
    n_kills: int,
    rng: random.Random,
    report: ProgressReport,
) -> dict[str, int]:
    """Run rows, and kill a part at random each time that a share of them is done. Return the number of kills by part."""
    kills = dict.fromkeys(PARTS, 0)
    plan = [PARTS[number % len(PARTS)] for number in range(n_kills)]
    rng.shuffle(plan)
    moments = sorted(rng.randrange(n_rows * 9 // 10) for _ in plan)
    run = _start_run(environment, source, target, *_GREEDY)
    while plan or run.poll() is None or run.returncode:
        if run.poll() is not None:  # a run cannot start while Redis is down
            kills["starts without Redis"] = kills.get("starts without Redis", 0) + 1
            if kills["starts without Redis"] > n_kills:
                raise RuntimeError(f"a bulk run ended with {run.returncode}:\n{_log_of(environment)[-2000:]}")
            run = _start_run(environment, source, target, *_GREEDY)
        if plan and _n_lines(target) >= moments[0]:
            moments.pop(0)
            part = plan.pop(0)
            kills[part] += 1
            if part == "bulk process":
                run.kill()
                run.wait()
                run = _start_run(environment, source, target, *_GREEDY)
            elif part == "worker":
                environment.living[0].kill()
                await environment.start_ready()
            else:
                server.kill()
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await asyncio.to_thread(server.start)
        report(n_rows + _n_lines(target), 2 * n_rows, f"rows, {n_kills - len(plan)} kills")
        await asyncio.sleep(POLL_S)
    return kills


def _log_of(environment: Environment) -> str:
    return (environment.folder / "bulk.log").read_text()


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _start_run(environment: Environment, source: Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(target), *options]
    command += ["--redis-url", environment.redis_url, "--queue", environment.queue]
    with (environment.folder / "bulk.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=environment.folder)


async def _until_end(run: subprocess.Popen[bytes], report: Callable[[], None]) -> None:
    """Wait until a run has ended, and kill it after `LONGEST_S`."""
    deadline_s = time.monotonic() + LONGEST_S
    while run.poll() is None:
        if time.monotonic() > deadline_s:
            run.send_signal(signal.SIGKILL)
            raise TimeoutError(f"a bulk run has not ended within {LONGEST_S:.0f} s")
        await asyncio.sleep(POLL_S)
        report()


async def _peak_mb(run: subprocess.Popen[bytes], report: Callable[[], None]) -> float:
    """Wait until a run has ended, and return the largest memory that it had."""
    peak_kb = 0
    while (code := run.poll()) is None:  # noqa: ASYNC110
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
