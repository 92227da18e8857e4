"""The blocking client has the methods of the asyncio client, works in any thread, and leaves no thread behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from tests.support.development_mode import complaints, run_script

from llamaq.producer import (
    AsyncClient,
    AsyncJob,
    AsyncStream,
    Client,
    FinishReason,
    InvalidRequest,
    InvalidSettings,
    Job,
    JobFailed,
    JobNotFound,
    JobState,
    NoWorker,
    QueueDepth,
    ResultTimeout,
    Stream,
    auto_cancelled_jobs,
)
from llamaq.producer.streaming.timed_wait import TimedWait
from llamaq.producer.testing import FakeWorker, serving


@pytest.fixture
def served(redis_url: str, queue: str) -> Iterator[Client]:
    """A client with a worker that answers each job with the words of its prompt."""
    with (
        serving(redis_url, queue, lambda request: (request.prompt or "chat").split(" ")),
        Client(redis_url, queue) as client,
    ):
        yield client


_other_threads: set[threading.Thread] = set()
"""Client threads that existed before the test, such as those of fixtures of other tests."""


@pytest.fixture(autouse=True)
def note_other_threads() -> None:
    _other_threads.clear()
    _other_threads.update(client_threads())


def client_threads() -> list[threading.Thread]:
    named = [thread for thread in threading.enumerate() if thread.name == "llamaq-client"]
    return [thread for thread in named if thread not in _other_threads]


def public_methods(kind: type) -> dict[str, Callable[..., object]]:
    return {name: value for name, value in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Client, AsyncClient), (Job, AsyncJob), (Stream, AsyncStream)])
def test_both_clients_have_the_same_methods_with_the_same_parameters(blocking: type, asynchronous: type) -> None:
    blocking_methods, async_methods = public_methods(blocking), public_methods(asynchronous)
    async_methods = {"close" if name == "aclose" else name: method for name, method in async_methods.items()}
    assert blocking_methods.keys() == async_methods.keys()
    for name, method in {**blocking_methods, "__init__": blocking.__init__}.items():  # type: ignore[misc]
        other = asynchronous.__init__ if name == "__init__" else async_methods[name]  # type: ignore[misc]
        left, right = (list(inspect.signature(one).parameters.values()) for one in (method, other))
        if blocking is Stream and name == "__init__":  # a `Stream` is made of an `AsyncStream`
            continue
        if blocking is Job and name == "__init__":  # a `Job` refers to its client, an `AsyncJob` to its connection
            assert [side.pop(1).name for side in (left, right)] == ["client", "connection"]
        if blocking is Stream and name == "started":  # only an event loop can ask whether the reader is gone
            assert right.pop().name == "is_gone"
        assert [(p.name, p.kind, p.default, p.annotation) for p in left] == [
            (p.name, p.kind, p.default, p.annotation) for p in right
        ]


def test_every_form_of_prompt_generates_and_streams(served: Client) -> None:
    result = served.generate("one two three", seed=4)
    assert (result.text, result.seed, result.finish_reason) == ("onetwothree", 4, FinishReason.STOP)
    assert "".join(served.stream("one two").text()) == "onetwo"
    assert served.generate_tokens([1]).text == "chat"
    assert [chunk.text for chunk in served.stream_tokens([1])] == ["chat"]
    messages = [{"role": "user", "content": "hi"}]
    assert served.chat(messages).text == "chat"
    assert [chunk.text for chunk in served.stream_chat(messages)] == ["chat"]


def test_a_job_can_be_followed_by_its_id(served: Client) -> None:
    job = served.submit("one two")
    assert job.is_new
    assert job.result(timeout=60).text == "onetwo"
    again = served.job(job.id)
    assert "".join(chunk.text for chunk in again.stream()) == "onetwo"
    assert again.status().state is JobState.FINISHED
    assert again.cancel() is False
    assert served.cancel(job.id) is False
    assert repr(again) == f"<Job {job.id}>"


def test_queue_depth_workers_and_stats_are_returned(served: Client) -> None:
    served.generate("one")
    assert served.queue_depth() == QueueDepth(waiting=0, running=0)
    assert [worker.card.worker for worker in served.workers()] == [f"fake-{served.queue}"]
    assert served.stats().queue == served.queue


def test_errors_of_the_asyncio_client_are_raised(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)  # the search for a worker
    with Client(redis_url, queue) as client:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            client.generate("x", max_tokens=-2)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            client.stream("x", max_tokens=-2)
        with pytest.raises(InvalidRequest):
            client.job("nonsense")
        # The time is over when the wait for the job begins.
        with patch.object(TimedWait, "until", return_value=False), pytest.raises(NoWorker):
            client.generate("x", timeout=60)
        with pytest.raises(NoWorker):
            client.tokenizer()
        job = client.submit("x")
        with pytest.raises(ResultTimeout):
            job.result(timeout=0.05)
        with pytest.raises(ResultTimeout):
            next(job.stream(timeout=0.05))
        with pytest.raises(JobNotFound):
            client.job(job.id[:-4] + "0000").status()
    with pytest.raises(InvalidSettings):
        Client("http://localhost")
    with pytest.raises(InvalidSettings):
        Client(queue="a b")


def test_a_failed_job_raises(redis_url: str, queue: str) -> None:
    with Client(redis_url, queue) as client:
        job = client.submit("x")

        async def fail() -> None:
            async with FakeWorker(redis_url, queue) as worker:
                await (await worker.start_next()).fail("internal", "it broke")

        asyncio.run(fail())
        with pytest.raises(JobFailed, match="it broke"):
            job.result()
        with pytest.raises(JobFailed, match="it broke"):
            list(job.stream())


def test_many_threads_share_one_client_and_one_thread(served: Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda number: served.generate(f"job {number}").text, range(64)))
        streams = list(pool.map(lambda n: "".join(served.stream(f"job {n}").text()), range(64)))
    assert texts == [f"job{number}" for number in range(64)]
    assert streams == texts
    assert len(client_threads()) == 1


def test_an_iterator_closed_early_cancels_its_job(redis_url: str, queue: str) -> None:
    with Client(redis_url, queue) as client:
        chunks = client.stream("x")

        async def emit_one() -> str:
            async with FakeWorker(redis_url, queue) as worker:
                attempt = await worker.start_next()
                await attempt.emit([1], "a")
                return attempt.claim.job_id

        with ThreadPoolExecutor(1) as pool:
            emitted = pool.submit(asyncio.run, emit_one())
            assert next(chunks).text == "a"
            job = client.job(emitted.result())
        assert not job.status().cancel_requested
        chunks.close()
        assert job.status().cancel_requested


def test_a_stream_keeps_its_client_alive(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda _: ["a", "b"]):
        chunks = Client(redis_url, queue).stream("x")
        gc.collect()
        assert "".join(chunk.text for chunk in chunks) == "ab"


def test_a_closed_client_raises_and_has_no_thread(redis_url: str, queue: str) -> None:
    client = Client(redis_url, queue)
    assert repr(client) == f"<Client queue='{queue}' idle>"
    client.queue_depth()
    assert "running=0" in repr(client)
    assert len(client_threads()) == 1
    client.close()
    client.close()
    assert client_threads() == []
    assert repr(client) == f"<Client queue='{queue}' closed>"
    with pytest.raises(RuntimeError, match="closed"):
        client.queue_depth()


def test_a_garbage_collected_client_has_no_thread(redis_url: str, queue: str) -> None:
    client = Client(redis_url, queue)
    client.queue_depth()
    del client
    gc.collect()
    assert client_threads() == []


async def flush_scripts(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.script_flush()


def test_close_interrupts_the_calls_of_other_threads_and_cancels_their_jobs(redis_url: str, queue: str) -> None:
    client = Client(redis_url, queue)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "x")
        with Client(redis_url, queue) as other:
            while other.queue_depth().waiting == 0:
                assert not waiting.done()
            # Redis no longer caches the script, so the cancellation takes several round trips. So it is still in flight
            # when the client closes.
            asyncio.run(flush_scripts(redis_url, queue))
            client.close()
            with pytest.raises(RuntimeError, match="closed"):
                waiting.result()
            assert other.queue_depth().waiting == 0


def faults(err: str) -> list[str]:
    """Return the complaints of a process, without the notice that no worker serves the queue."""
    return [line for line in complaints(err) if not line.startswith("client.no_worker")]


def test_a_process_that_does_not_close_its_client_exits_at_once_without_output(redis_url: str, queue: str) -> None:
    code = """
import sys
from unittest.mock import AsyncMock
from llamaq.producer import Client, auto_cancelled_jobs
from llamaq.producer.streaming.timed_wait import TimedWait
auto_cancelled_jobs.LAST_WAIT_S = 10.0  # the search for a worker
TimedWait.until = AsyncMock(return_value=False)  # the time is over when the wait for the job begins
client = Client(*sys.argv[1:])
job = client.submit("x")
chunks = client.stream("y")
try:
    client.generate("z", timeout=60)
except Exception as exc:
    print(type(exc).__name__)
"""
    process = run_script(code, redis_url, queue)
    out, err = process.communicate(timeout=60)
    assert (out, faults(err), process.returncode) == ("NoWorker\n", [], 0)


def test_an_interrupt_cancels_the_job_that_is_waited_for(redis_url: str, queue: str) -> None:
    code = """
import sys
from llamaq.producer import Client
client = Client(*sys.argv[1:])
try:
    client.generate("x")
except KeyboardInterrupt:
    print("interrupted")
"""
    with Client(redis_url, queue) as client:
        process = run_script(code, redis_url, queue)
        while client.queue_depth().waiting == 0:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (out, faults(err), process.returncode) == ("interrupted\n", [], 0)
        assert client.queue_depth().waiting == 0


def test_a_client_made_before_a_fork_works_in_parent_and_child(redis_url: str, queue: str) -> None:
    code = """
import os, sys
from llamaq.producer import Client
with Client(*sys.argv[1:]) as client:
    before = client.submit("parent")
    child = os.fork()
    # Each process writes its line in one call, so that the lines of parent and child are not mixed.
    os.write(1, f"{client.submit('x').status().state} {before.status().state}\\n".encode())
    if child:
        _, status = os.waitpid(child, 0)
        print(client.queue_depth().waiting, os.waitstatus_to_exitcode(status), flush=True)
"""
    process = run_script(code, redis_url, queue)
    out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["3 0", "queued queued", "queued queued"]
    assert [line for line in err.splitlines() if "Error" in line or "Traceback" in line] == []
    assert process.returncode == 0


def test_a_child_of_multiprocessing_that_leaves_a_stream_open_cancels_its_job(redis_url: str, queue: str) -> None:
    code = """
import multiprocessing, sys
from llamaq.producer import Client

def leave() -> None:
    global stream  # as a web backend's global client: nothing is garbage collected before the exit
    client = Client(*sys.argv[1:])
    stream = client.stream("x")

child = multiprocessing.get_context("fork").Process(target=leave)
child.start()
child.join()
print(child.exitcode)
"""
    process = run_script(code, redis_url, queue)
    out, err = process.communicate(timeout=60)
    assert (out, faults(err)) == ("0\n", [])
    with Client(redis_url, queue) as client:
        assert client.queue_depth().waiting == 0
