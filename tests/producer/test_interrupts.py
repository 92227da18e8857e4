"""An exception in a thread that waits for the blocking client reaches the caller unchanged, and cancels the job."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import pytest

from llamaq.producer import Chunk, Client, FinishReason
from llamaq.producer.testing import FakeWorker, serving


class JobTimeout(Exception):
    """As RQ's JobTimeoutException: raised by the handler of SIGALRM."""


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """Raise `JobTimeout` in the main thread after some seconds, as the death penalty of RQ does.

    The timer of pytest-timeout continues afterwards.
    """

    def raise_timeout(_number: int, _frame: FrameType | None) -> None:
        raise JobTimeout("task exceeded its maximum timeout")

    previous = signal.signal(signal.SIGALRM, raise_timeout)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def read_all(chunks: Iterator[object]) -> None:
    for _ in chunks:
        pass


CALLS: dict[str, Callable[[Client], object]] = {
    "generate": lambda client: client.generate("x"),
    "stream": lambda client: read_all(client.stream("x")),
    "text": lambda client: read_all(client.stream("x").text()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_job_timeout_in_a_waiting_call_surfaces_and_cancels_the_job(redis_url: str, queue: str, call: str) -> None:
    with Client(redis_url, queue) as client:
        client.queue_depth()  # connects
        with pytest.raises(JobTimeout, match="maximum timeout"), alarm_after(0.2):
            CALLS[call](client)
        assert client.queue_depth().waiting == 0
        assert client.queue_depth().waiting == 0, "the client works afterwards"


def test_a_timeout_between_two_chunks_cancels_the_running_job(redis_url: str, queue: str) -> None:
    async def emit_until_cancelled() -> str:
        async with FakeWorker(redis_url, queue) as worker:
            attempt = await worker.start_next()
            await attempt.emit([1], "a")
            # Further chunks would keep the reader busy. The timeout could then come outside of the stream's code, in
            # the loop of the reader, who still has the stream and may read on.
            while (await attempt.emit([], "")).code == "ok":  # noqa: ASYNC110  # a worker polls too
                await asyncio.sleep(0.001)
            await attempt.finish(FinishReason.CANCELLED)
            return attempt.claim.job_id

    with Client(redis_url, queue) as client, ThreadPoolExecutor(1) as pool:
        emitting = pool.submit(asyncio.run, emit_until_cancelled())
        chunks = client.stream("x")
        next(chunks)
        with pytest.raises(JobTimeout), alarm_after(0.1):
            read_all(chunks)
        assert client.job(emitting.result()).result().finish_reason is FinishReason.CANCELLED


def test_an_interrupted_reader_of_a_jobs_stream_gets_its_own_error_and_the_job_continues(
    redis_url: str, queue: str
) -> None:
    with Client(redis_url, queue) as client:
        job = client.submit("x")
        with pytest.raises(JobTimeout), alarm_after(0.2):
            read_all(job.stream())
        assert client.queue_depth().waiting == 1


@pytest.fixture
def timeouts_that_python_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python drop a `JobTimeout` that the signal raised in a finalizer or in the callback of a weak reference.

    Nothing can raise through those: Python hands the error to `sys.unraisablehook`, and the interrupted code continues.
    """
    report = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, JobTimeout):
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", report_others)


@pytest.mark.usefixtures("timeouts_that_python_drops")
def test_interrupts_at_any_moment_leave_no_job_and_raise_nothing_else(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda _: ["a"] * 20), Client(redis_url, queue) as client:
        client.generate("warm up")
        n_timeouts = 0
        for number in range(40):
            try:
                with alarm_after(0.0005 * (number + 1)):
                    read_all(client.stream("x"))
            except JobTimeout:
                n_timeouts += 1
        assert n_timeouts > 0
        deadline = time.monotonic() + 30
        while (depth := client.queue_depth()).waiting + depth.running:
            assert time.monotonic() < deadline
            time.sleep(0.01)


INTERRUPTED = """
import os, signal, sys, threading, time
from llamaq.producer import Client

def interrupt_the_wait():  # anywhere else, the interrupt would be raised outside of the stream's code
    while (code := sys._current_frames()[main].f_code).co_name != "run" or "blocking_portal" not in code.co_filename:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

main = threading.main_thread().ident
with Client(*sys.argv[1:]) as client:
    try:
        for chunk in client.stream("x"):
            print(chunk.text, flush=True)
            threading.Thread(target=interrupt_the_wait).start()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(7)  # as a work horse of RQ: nothing runs at exit
"""


def test_ctrl_c_in_a_stream_is_a_keyboard_interrupt_and_the_job_is_cancelled_before_it(
    redis_url: str, queue: str
) -> None:
    async def emit_one() -> str:
        async with FakeWorker(redis_url, queue) as worker:
            attempt = await worker.start_next()
            await attempt.emit([1], "first")
            return attempt.claim.job_id

    command = [sys.executable, "-c", INTERRUPTED, redis_url, queue]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job_id = asyncio.run(emit_one())
    out, err = process.communicate(timeout=60)
    assert (out, "Traceback" in err, process.returncode) == ("first\ninterrupted\n", False, 7)
    with Client(redis_url, queue) as client:
        assert client.job(job_id).status().cancel_requested


def test_closing_a_stream_ends_the_read_of_another_thread(redis_url: str, queue: str) -> None:
    with Client(redis_url, queue) as client:
        stream = client.stream("x")
        got: list[Chunk] = []
        reader = threading.Thread(target=lambda: got.extend(stream))
        reader.start()
        stream.close()
        reader.join(30)
        assert not reader.is_alive()
        assert stream.job.status().finish_reason is FinishReason.CANCELLED
        assert "ended" in repr(stream)
