"""The examples of docs/backend.md run as they are written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support import readme
from tests.support.node import run_node

from llamaq.producer import AsyncJob
from llamaq.producer.testing import FakeWorker

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "backend.md").read_text()

BROWSER = """
globalThis.sessionStorage = {};
let onEnd;  // called at the end of the stream
globalThis.fetch = async (path) => ({ok: true, json: async () => ({id: "default.0.1"})});
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor(path) {
    console.log(path);
    this.listeners = {};
    setTimeout(() => {
      if (path.includes("unknown")) {
        this.readyState = 2;
        this.onerror();
        onEnd();
        return;
      }
      this.readyState = 0;
      this.onerror();
      this.onmessage({data: '"Hello\\\\n"'});
      this.listeners.end({data: "length"});
      onEnd();
    });
  }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  close() { console.log("closed"); }
};
"""
"""Stands for a browser that connects twice, receives one piece of text and the end, and an error for an unknown job."""

READERS = """
const show = (text) => console.log(JSON.stringify(text));
const ended = (kind, reason) => console.log(kind, reason);
const read = async () => {
  const end = new Promise((resolve) => { onEnd = resolve; });
  await answer("hi", show, ended);
  await end;
  show(sessionStorage);
};
(async () => {
  await read();
  sessionStorage.job = "unknown";
  await read();
})();
"""
"""Reads two streams, one after the other, and shows what is stored after the end of each."""


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def module_of(source: str, name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, f"docs/backend.md, {name}", "exec"), module.__dict__)
    return module


@pytest.fixture
def app_file(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the module `app`, which the tests on the page import."""
    monkeypatch.setenv("TEST_REDIS_URL", redis_url)
    for name in ("LLAMAQ_REDIS_URL", "LLAMAQ_QUEUE"):  # the tests on the page set them
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "app.py"
    sys.modules.pop("app", None)


@pytest.fixture
def test_module(app_file: Path) -> Any:
    """The first tests on the page; its variable `app` is the app on the page."""
    app, tests, _ = examples("python")
    app_file.write_text(app)
    return module_of(tests, "test_app")


@pytest.fixture
def disconnect_test(app_file: Path) -> Any:
    """The last test on the page; its variable `app` is the app of the README."""
    app_file.write_text(readme.block("backend"))
    return module_of(examples("python")[-1], "test_disconnect")


@pytest.fixture
def queue(test_module: Any) -> str:
    return str(test_module.QUEUE)


def test_the_tests_of_the_backend_pass_one_after_the_other(test_module: Any) -> None:
    test_module.test_a_reader_that_returns_gets_the_rest_of_the_text()
    test_module.test_a_reader_gets_the_text_until_the_job_fails()


async def test_the_test_of_a_reader_that_leaves_passes_with_the_backend_of_the_readme(disconnect_test: Any) -> None:
    await disconnect_test.test_a_reader_that_leaves_cancels_its_job()


def test_the_backend_answers_errors_with_a_status_or_an_event(test_module: Any, redis_url: str, queue: str) -> None:
    def fail(_: object) -> list[str]:
        raise ValueError("broken on purpose")

    with test_module.TestClient(test_module.app) as http:
        assert http.get(f"/jobs/{queue}.0.{'0' * 32}/events").status_code == 404
        path = f"/jobs/{http.post('/jobs', params={'prompt': 'hello'}).json()['id']}"
        with pytest.raises(ValueError, match="broken"), test_module.serving(redis_url, queue, fail):
            assert http.get(f"{path}/events").text == "event: failed\ndata: internal\n\n"
        waiting = f"/jobs/{http.post('/jobs', params={'prompt': 'hello'}).json()['id']}"
        assert http.delete(waiting).json() is True
        assert http.get(f"{waiting}/events").text == "event: end\ndata: cancelled\n\n"


@pytest.mark.usefixtures("test_module")
async def test_a_backend_that_stops_cancels_the_jobs_of_its_open_streams(redis_url: str, queue: str) -> None:
    backend: Any = sys.modules["app"]
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        async with backend.lifespan(backend.app):
            stream = await backend.client.stream("hello")
            attempt = await worker.start_next()
            await attempt.emit([1], "one")
            assert (await anext(stream)).text == "one"
        assert (await attempt.emit([2], "two")).code == "cancel"


@pytest.mark.usefixtures("test_module")
async def test_a_reader_receives_a_comment_in_each_pause(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = sys.modules["app"]
    monkeypatch.setattr(backend, "PAUSE_S", 0.2)
    async with backend.client, FakeWorker(redis_url, queue) as worker:
        read = backend.events(await backend.client.submit("hello"), 1)
        assert await anext(read) == ": waiting\n\n"
        attempt = await worker.start_next()
        await attempt.emit([1], "one")
        assert await anext(read) == 'id: 3\ndata: "ne"\n\n'
        assert await anext(read) == ": waiting\n\n"
        await attempt.emit([2], " two")
        assert await anext(read) == 'id: 7\ndata: " two"\n\n'
        await attempt.finish()
        assert [event async for event in read] == ["event: end\ndata: stop\n\n"]


@pytest.mark.usefixtures("test_module")
async def test_a_reader_receives_the_rest_of_the_text_after_an_outage(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = sys.modules["app"]

    async def broken(_: Any) -> None:
        raise RedisConnectionError

    async with backend.client, FakeWorker(redis_url, queue) as worker:
        job = await backend.client.submit("hello")
        read = backend.events(job, 0)
        attempt = await worker.start_next()
        await attempt.emit([1], "one")
        assert await anext(read) == 'id: 3\ndata: "one"\n\n'
        with monkeypatch.context() as outage:
            outage.setattr(AsyncJob, "status", broken)
            await attempt.finish(tokens=[2], text=" two")
            assert await anext(read) == 'id: 7\ndata: " two"\n\n'
            assert await anext(read) == ": waiting\n\n"
        assert [event async for event in read] == ["event: end\ndata: stop\n\n"]


@pytest.mark.usefixtures("test_module")
def test_the_backend_answers_503_without_redis(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", f"redis://127.0.0.1:{free_port}")
    app = module_of(examples("python")[0], "app")
    with TestClient(app.app) as http:
        response = http.post("/jobs", params={"prompt": "hello"})
    assert (response.status_code, response.text) == (503, "ConnectionError")


def test_the_page_in_the_browser_shows_the_text_and_forgets_the_ended_job(tmp_path: Path) -> None:
    (script,) = examples("javascript")
    program = tmp_path / "page.js"
    program.write_text(f"{BROWSER}{script}{READERS}")
    read = ["/jobs/default.0.1/events", '"Hello\\n"', "closed", "end length", "{}"]
    assert run_node(str(program)).splitlines() == [*read, "/jobs/unknown/events", "failed unavailable", "{}"]
