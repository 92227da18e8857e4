"""The README's examples run as they are written, its commands parse, and its names exist."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields as fields_of
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import typer
from fastapi.testclient import TestClient
from starlette.requests import Request
from tests.support.http_server import serving_http
from tests.support.node import run_node
from tests.support.readme import README, block

from llamaq.cli.main import build_app
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.producer import Client, JobFailed
from llamaq.worker.engine_loop.telemetry import EndedJob, JobTimeline
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process.supervisor import Supervisor
from llamaq.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
T = TypeVar("T")


def run_block(name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(block(name), f"README.md, {name}", "exec"), namespace)
    return namespace


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


# ---- the examples


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis whose default queue has a worker with the demo model."""
    folder = tmp_path_factory.mktemp("served")
    with EmbeddedRedis() as redis, (folder / "log").open("wb") as log:
        # The demo model generates many tokens in the default interval, and these texts are short. The ticks are paced,
        # so that a busy machine streams a text in several pieces too.
        settings = WorkerSettings(redis_url=redis.url, n_threads=1, stream_interval_ms=0, batch_strategy="paced:Paced")
        supervisor = Supervisor([settings], log)
        supervisor.start()
        try:
            await_worker(redis.url, "default")
            yield redis.url
        finally:
            supervisor.stop()


@pytest.fixture
def environment(served: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith("LLAMAQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLAMAQ_REDIS_URL", served)
    return served


def await_worker(url: str, queue: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with Client(url, queue) as client:
        while not client.workers():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_every_python_block_has_a_test() -> None:
    named = re.findall(r"<!-- test: (\w+) -->\n```python", README)
    assert named == ["backend", "openai", "langchain", "background", "errors", "sync", "attach", "strategy", "cache"]
    assert README.count("```python") == len(named)


@pytest.mark.usefixtures("environment")
def test_the_backend_example_streams_a_text() -> None:
    example = run_block("backend")

    async def use() -> list[str]:
        staying = Request({"type": "http"}, receive=asyncio.Event().wait)  # type: ignore[arg-type]
        response = await example["answer"]("Once upon a time", staying)
        pieces = [piece async for piece in response.body_iterator]  # at once: what waits is read as one piece
        with pytest.raises(JobFailed, match="prompt_too_long") as failed:
            await example["answer"]("Once upon a time " * 3000, staying)
        assert failed.value.http_status == 400
        await example["client"].aclose()
        return pieces

    pieces = asyncio.run(use())
    assert len(pieces) > 3
    assert len("".join(pieces)) > 40


def responses_of_the_backend(*prompts: str) -> list[tuple[int, str]]:
    """Return the status and the text with which the backend of the README, with its handler of errors, answers."""
    names = run_block("backend")
    exec(compile(block("errors"), "README.md, errors", "exec"), names)
    with TestClient(names["app"]) as http:
        answers = [http.post("/answer", params={"prompt": prompt}) for prompt in prompts]
        # FastAPI caches the endpoint, which refers to the client. So the client is not garbage collected, and its
        # connections would stay open.
        assert http.portal is not None
        http.portal.call(names["client"].aclose)
    return [(got.status_code, got.text) for got in answers]


@pytest.mark.usefixtures("environment")
def test_the_backend_answers_errors_with_a_status_and_a_code(
    monkeypatch: pytest.MonkeyPatch, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert responses_of_the_backend("Once upon a time " * 3000) == [(400, "prompt_too_long")]
    assert "(job default.0." in caplog.text, "the text of the error is in the log"
    monkeypatch.setenv("LLAMAQ_QUEUE", "without-worker")
    assert responses_of_the_backend("hello") == [(503, "NoWorker")]
    monkeypatch.setenv("LLAMAQ_REDIS_URL", f"redis://127.0.0.1:{free_port}")
    assert responses_of_the_backend("hello") == [(503, "ConnectionError")]


@pytest.mark.usefixtures("environment")
def test_the_blocking_example_prints_a_text_and_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    run_block("sync")
    first, _, story = capsys.readouterr().out.partition("\n")
    assert len(first) > 10
    assert len(story) > 40


@pytest.mark.usefixtures("environment")
def test_the_example_of_attaching_prints_all_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    run_block("attach")
    printed = capsys.readouterr().out.strip()
    assert printed.endswith("finished")
    assert len(printed) > 20
    assert "." not in printed, "the stop string"


def run_beside_a_server(run: Callable[[str], T], redis_url: str, example: str) -> T:
    """Run an example with the URL of a server, and return what `run` returns."""

    async def use() -> T:
        async with serving_http(redis_url, "default") as url:
            return await asyncio.to_thread(run, example.replace("http://localhost:8080", url))

    return asyncio.run(use())


@pytest.mark.parametrize("name", ["openai", "background"])
def test_the_examples_of_the_openai_package_print_a_story(
    environment: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """tests/e2e/test_http_langchain.py runs the example of LangChain, whose import takes long."""

    def run(example: str) -> None:
        names: dict[str, Any] = {}
        exec(compile(example, f"README.md, {name}", "exec"), names)
        names["client"].close()

    run_beside_a_server(run, environment, block(name))
    assert len(capsys.readouterr().out) > 40


def test_the_example_of_curl_prints_the_events_of_a_stream(environment: str) -> None:
    printed = run_beside_a_server(run_as_curl, environment, block("curl", "bash"))
    chunks = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 1  # tokens that arrive together are one chunk
    assert printed.rstrip().endswith("data: [DONE]")


def run_as_curl(command: str) -> str:
    """Return what the command receives. No curl is needed: the options -N, -H and -d are read here."""
    program, *arguments = shlex.split(command)
    assert program == "curl"
    arguments.remove("-N")
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    name, value = options.pop("-H").split(": ")
    answer = httpx.post(arguments[0], headers={name: value}, content=options.pop("-d"), timeout=60)
    assert not options
    return answer.raise_for_status().text


def test_the_example_of_javascript_prints_a_story(environment: str) -> None:
    def run(example: str) -> str:
        return run_node("--input-type=module", "--eval", example)

    assert len(run_beside_a_server(run, environment, block("javascript", "javascript"))) > 40


@pytest.mark.usefixtures("environment")
def test_the_example_of_the_cache_shares_the_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    run_block("cache")
    reused = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    # The worker prepares the three jobs at the same time. The first job that it admits computes the system prompt.
    assert reused.count(["0", "None"]) == 1
    reused.remove(["0", "None"])
    assert len(reused) == 2
    assert all(int(n_tokens) > 10 and tier in ("running", "device") for n_tokens, tier in reused)


def test_the_example_of_a_strategy_runs_in_a_worker(environment: str, tmp_path: Path) -> None:
    (tmp_path / "my_strategies.py").write_text(block("strategy"))
    (line,) = (line for line in commands_of(README) if "my_strategies" in line)
    options = [*shlex.split(line)[1:], "--queue", "own-strategy", "--n-threads", "1", "--n-parallel", "2"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen([Path(sys.executable).with_name("llamaq"), *options], cwd=tmp_path, stderr=log)
    try:
        await_worker(environment, "own-strategy")
        with Client(environment, "own-strategy") as client:
            jobs = [client.submit("Once upon a time", max_tokens=10, ignore_eos=True) for _ in range(12)]
            assert [len(job.result(timeout=60).tokens) for job in jobs] == [10] * 12
    finally:
        worker.terminate()
        assert worker.wait(30) == 0
    assert "strategy.refused" not in (tmp_path / "log").read_text(), "the worker did not use the plans of the strategy"


# ---- the commands


def commands_of(text: str) -> list[str]:
    """Return every `llamaq …` command of the console blocks, without comments."""
    lines = [line for found in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in found.splitlines()]
    return commands_in(line[2:] for line in lines if line.startswith("$ "))


def commands_in(lines: Iterable[str]) -> list[str]:
    """Return every `llamaq …` command of lines of a shell, without comments and variables."""
    parts = [part for line in lines for part in re.split(" ; | && ", re.sub("  +# .*", "", line))]
    commands = [re.sub("^([A-Z_]+=\\S+ )+", "", part.strip().removesuffix(" &")) for part in parts]
    return [command for command in commands if command.startswith("llamaq ")]


def commands_of_pages() -> list[str]:
    """Return the `llamaq …` commands of all blocks of the documents, which begin at a line or are indented."""
    texts = [path.read_text() for path in (*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md")]
    blocks = [found for text in texts for found in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)]
    blocks += [found for text in texts for found in re.findall(r"(?<=\n\n)((?:    .*\n)+)", text)]
    whole = "\n".join(blocks).replace("\\\n", " ")
    return sorted({*commands_in(line.strip().removeprefix("$ ") for line in whole.splitlines())})


@cache
def command_named(name: str) -> Any:
    group: Any = typer.main.get_command(build_app(name))
    return group.commands[name]


@pytest.mark.parametrize("line", [*commands_of(README), *commands_of_pages()])
def test_every_command_of_the_documents_parses(line: str) -> None:
    _, name, *options = shlex.split(line.partition(" | ")[0].partition(" > ")[0])
    command = command_named(name)
    if hasattr(command, "commands"):
        name, *options = options
        command = command.commands[name]
    command.make_context(name, options)


def test_the_commands_of_the_documents_are_found() -> None:
    found = commands_of_pages()
    assert "llamaq worker --speculation ngram" in found  # indented
    assert "llamaq dead list" in found  # in a block of a console
    assert any(line.startswith("llamaq bulk run") for line in found)  # in a block of bash
    assert len(found) > 30


def test_every_flag_that_the_documents_name_exists() -> None:
    root: Any = typer.main.get_command(build_app())
    commands = [root, *root.commands.values(), *map(command_named, ("worker", "up", "demo"))]
    groups = [command_named(name) for name, command in root.commands.items() if hasattr(command, "commands")]
    commands += [each for group in groups for each in group.commands.values()]
    known = {flag for command in commands for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    documents = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
    of_others = re.compile(
        r"docker |redis-cli|--profile gpu|helm |kubectl|rq worker|--build-arg|opentelemetry-|lm_eval"
    )
    lines = [line for text in documents for line in text.splitlines() if not of_others.search(line)]
    named = {flag for line in lines for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert len(named) >= 10
    assert named <= known


# ---- the tables


def test_the_readme_names_the_fields_of_results_and_measurements() -> None:
    (fields,) = re.findall(r"`Result\((.*?)\)`", README)
    assert set(fields.split(", ")) == set(Result.model_fields)
    said = README.partition("Hooks receive every measurement")[2].partition("\n\n")[0]
    tick, _, done = said.partition("`request.done`")
    assert set(TickStats.model_fields) <= set(names_in(tick))
    of_end = {field.name for kind in (EndedJob, JobTimeline) for field in fields_of(kind)} - {"stats", "timeline"}
    assert of_end <= set(names_in(done))
