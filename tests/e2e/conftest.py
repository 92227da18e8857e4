"""Worker processes on real models behind a real Redis, and clients that talk to them.

The tests share workers, because starting them takes most of the time. The workers stop when a test of another file
(`start_worker`) or of another folder (`start_shared_worker`) follows, because an idle worker takes processor time too:
`tests/support/distribution.py` runs the tests that share a worker one after the other. A failed test shows the logs of
all workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.support.forked_scripts import ForkedProcess, fork_server

from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import Keys
from llamaq.producer import Client, InvalidRequest, JobNotFound, Pooling
from llamaq.tools.random_gguf import CHATML, Architecture, ModelSpec, write_model
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.process import child_main
from llamaq.worker.settings import WorkerSettings

DEMO_MODEL = Path(__file__).parents[2] / "worker" / "llamaq" / "worker" / "model" / "llamaq-demo.gguf"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
AWAIT_TIMEOUT_S = 60.0
POLL_S = 0.02
LOG_TAIL_CHARS = 4000

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{{ '' if enable_thinking else '\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""A chat template of a model that reasons, and calls tools in the format of Hermes, as Qwen's models do."""

HOOK = """
import json

_file = open("measurements.jsonl", "a", buffering=1)

def on_measurement(name, measurements):
    _file.write(json.dumps({"name": name, **measurements}) + "\\n")
"""
"""A hook module in the worker's working directory. It appends each measurement to a file in this folder."""


@dataclass(frozen=True)
class ServedQueue:
    """A queue and the worker process that serves it."""

    settings: WorkerSettings
    process: subprocess.Popen[bytes] | ForkedProcess
    folder: Path
    """The worker's working directory."""

    @property
    def queue(self) -> str:
        return self.settings.queue

    @property
    def url(self) -> str:
        return self.settings.redis_url

    @property
    def log(self) -> str:
        """The log of the worker so far."""
        return (self.folder / "worker.log").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @contextmanager
    def recording(self) -> Iterator[list[dict[str, Any]]]:
        """Yield an empty list. At exit, it is filled with the measurements of the ticks within the context."""
        ticks: list[dict[str, Any]] = []
        begin = self._run_marker_job()
        yield ticks
        end = self._run_marker_job()
        measured = self.measurements()[begin + 1 : end]
        ticks += [each for each in measured if each["name"] == "tick"][
            :-1
        ]  # the last tick is that of the second marker job

    def _run_marker_job(self) -> int:
        """Run a job of one tick, and return the index of its measurement. All earlier jobs have lower indexes."""
        with self.client() as client:
            job_id = client.generate_tokens([1], max_tokens=1).job_id
        deadline = time.monotonic() + AWAIT_TIMEOUT_S
        while job_id not in (measured := [each.get("job_id") for each in self.measurements()]):
            assert time.monotonic() < deadline, f"no measurement of {job_id}"
            time.sleep(POLL_S)
        return measured.index(job_id)

    def measurements(self) -> list[dict[str, Any]]:
        """Return the measurements that the worker's hook has received so far."""
        file = self.folder / "measurements.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def client(self) -> Client:
        return Client(self.url, self.queue, timeout_s=60, event_ttl_s=60)


_served: list[ServedQueue] = []
StartWorker = Callable[..., ServedQueue]
Await = Callable[..., Any]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"log of the worker of {one.queue}", one.log[-LOG_TAIL_CHARS:]) for one in _served]
    return report


def _worker_starter(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartWorker]:
    """Yield a function that starts a worker process on a new queue, and waits until the queue lists the worker.

    The workers stop when the scope of the fixture ends.
    """
    started: list[ServedQueue] = []

    def start(queue: str, model: Path, *, patch: str = "", **settings: Any) -> ServedQueue:
        """`patch` is Python code that the worker runs at its start."""
        folder = tmp_path_factory.mktemp(queue)
        (folder / "recording_hook.py").write_text(HOOK + patch)
        chosen = WorkerSettings(
            redis_url=redis_server.url,
            queue=queue,
            model=str(model),
            n_threads=1,
            hooks=("recording_hook:on_measurement",),
            **settings,
        )
        served = ServedQueue(chosen, _spawn(chosen, folder), folder)
        started.append(served)
        _served.append(served)
        _wait_until_listed(served)
        return served

    yield start
    for served in started:
        _served.remove(served)
        _stop(served)


start_worker = pytest.fixture(scope="module")(_worker_starter)
"""Starts workers that run until a test of another file follows."""
start_shared_worker = pytest.fixture(scope="package")(_worker_starter)
"""Starts workers that run until a test of another folder follows."""


def _spawn(settings: WorkerSettings, folder: Path) -> subprocess.Popen[bytes] | ForkedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    process: subprocess.Popen[bytes] | ForkedProcess
    with (folder / "worker.log").open("wb") as log:
        if server := fork_server():
            process = server.start([child_main.__file__], cwd=folder, variables=environment, output=log, has_input=True)
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "llamaq.worker.process.child_main"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
    assert process.stdin is not None
    process.stdin.write(settings.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return process


def _wait_until_listed(served: ServedQueue) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with served.client() as client:
        while not client.workers():
            assert served.is_running, served.log
            assert time.monotonic() < deadline, served.log
            time.sleep(POLL_S)


def _stop(served: ServedQueue) -> None:
    """Stop the worker, if it runs: close its lifeline and send it a signal."""
    assert served.process.stdin is not None
    served.process.terminate()
    served.process.stdin.close()
    try:
        served.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.wait()


@pytest.fixture(autouse=True)
def cancel_remaining_jobs() -> Iterator[None]:
    """Cancel the jobs that still run after a failed test, so that they occupy no slots in the next test."""
    yield
    for served in _served:
        with Redis.from_url(served.url) as redis:
            streams = [Keys().jobs(served.queue, 0, priority) for priority in Priority]
            entries: Any = [entry for stream in streams for entry in redis.xrange(stream)]
        if entries:
            with served.client() as client:
                for _, fields in entries:
                    with suppress(InvalidRequest, JobNotFound):
                        client.cancel(fields.get(b"id", b"").decode(errors="replace"))


@pytest.fixture(scope="package")
def demo(start_shared_worker: StartWorker) -> ServedQueue:
    """A worker with four slots and the demo model."""
    return start_shared_worker("demo", DEMO_MODEL)


@pytest.fixture(scope="package")
def narrow(start_shared_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker whose four slots share 512 cells, on a random-weight model that generates no end token. It drafts."""
    spec = ModelSpec(Architecture.LLAMA, n_ctx=4096, chat_template=CHATML)
    model = write_model(tmp_path_factory.mktemp("models") / "narrow.gguf", spec, seed=1)
    return start_shared_worker("narrow", model, n_ctx=512, heartbeat_s=0.2, speculation="ngram", draft_max=8)


@pytest.fixture(scope="package")
def slow(start_shared_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker that prefills long prompts in hundreds of small chunks, so that a test can observe the prefill."""
    spec = ModelSpec(Architecture.LLAMA, n_layers=4, n_embd=256, n_ff=512, n_heads=8, n_kv_heads=2, n_ctx=32_768)
    model = write_model(tmp_path_factory.mktemp("models") / "slow.gguf", spec, seed=2)
    return start_shared_worker(
        "slow", model, n_ctx=32_768, chunk_size=8, disconnect_s=2.0, heartbeat_s=0.2, lease_s=2.0
    )


@pytest.fixture(scope="package")
def caller(start_shared_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker on a random-weight model whose chat template has tools and reasoning."""
    spec = ModelSpec(Architecture.LLAMA, n_ctx=4096, chat_template=TOOL_TEMPLATE)
    return start_shared_worker("caller", write_model(tmp_path_factory.mktemp("models") / "caller.gguf", spec, seed=1))


@pytest.fixture(scope="package")
def tagger(start_shared_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker on a model as that of `caller`, in whose vocabulary each tag of the chat template is a control token."""
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    spec = ModelSpec(Architecture.LLAMA, n_ctx=4096, chat_template=TOOL_TEMPLATE, control_tags=tags)
    return start_shared_worker("tagger", write_model(tmp_path_factory.mktemp("models") / "tagger.gguf", spec, seed=1))


@pytest.fixture(scope="package")
def embedder(start_shared_worker: StartWorker, demo_model: Path) -> ServedQueue:
    """A worker with the demo model that computes embeddings."""
    return start_shared_worker("embedder", demo_model, embeddings=True, pooling=Pooling.MEAN, n_batch=256)


@pytest.fixture(scope="package")
def reranker(start_shared_worker: StartWorker, rerank_model: Path) -> ServedQueue:
    """A worker that scores documents."""
    return start_shared_worker("reranker", rerank_model, embeddings=True)


@pytest.fixture(scope="package")
def client(demo: ServedQueue) -> Iterator[Client]:
    """A client of the demo model's queue."""
    with demo.client() as opened:
        yield opened


@pytest.fixture(scope="package")
def narrow_client(narrow: ServedQueue) -> Iterator[Client]:
    with narrow.client() as opened:
        yield opened


@pytest.fixture(scope="package")
def slow_client(slow: ServedQueue) -> Iterator[Client]:
    with slow.client() as opened:
        yield opened


@pytest.fixture(scope="package")
def wait_for() -> Await:
    """A function that waits until `condition` returns a true value, and returns this value."""

    def wait(condition: Callable[[], Any], timeout_s: float = AWAIT_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (seen := condition()):
            assert time.monotonic() < deadline, f"{condition} did not become true within {timeout_s:g} s"
            time.sleep(POLL_S)
        return seen

    return wait
