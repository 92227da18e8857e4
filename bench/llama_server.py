"""llama-server as a peer: started from the `xllamacpp` wheel, asked over HTTP with token ids as workers are.

It gets the model file, the threads, the context and the number of slots of a worker, `--kv-unified`, which lets a slot
use what others leave, and otherwise its own defaults: prompts cached, 8 GiB of host memory for slots' states, cells of
idle slots moved there when others need room, similarity 0.1, no reuse of shifted chunks (`--cache-reuse 0`).
Requests are greedy with top-k 1, which made its sampling fastest of what was tried (vocabulary 151,936: 1.16 ms a token
against 1.3 with its default samplers, 1.25 with top-k alone, 1.9 with `backend_sampling`; nearly all of it the model).

The wheel's x86-64 build for Linux stops at AVX2, where a worker's llama.cpp is built for the CPU: figures say also how
the two compare where nothing can be reused.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from harness import JOB_TIMEOUT_S, START_TIMEOUT_S
from job_timings import Answer, Timeline
from llamaq.common.errors import LlamaqError
from llamaq.worker.settings import WorkerSettings

PYTHON = "LLAMAQ_BENCH_PEER"
"""Environment variable: the python of an environment with xllamacpp. `make bench-peers` makes one and sets it."""
STOP_TIMEOUT_S = 10.0


class LlamaServer:
    """A running llama-server, asked over HTTP."""

    def __init__(self, address: str, version: str, params: dict[str, Any]) -> None:
        self._netloc = urlsplit(address).netloc
        self._params = params
        self._n_slots: int = params["n_parallel"]
        self.version = version

    def ask(self, prompts: Sequence[list[int]], n_out: int, *, cache_prompt: bool = True) -> list[Answer]:
        """All at once, streamed, over connections that are open before the first is sent."""
        with ThreadPoolExecutor(len(prompts)) as threads, ExitStack() as ends:
            connections = [ends.enter_context(self._connected()) for _ in prompts]
            asked = partial(_complete, n_out=n_out, cache_prompt=cache_prompt)
            answers = list(threads.map(asked, connections, prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            if len(answer.timeline.tokens) < n_out:
                answer.timeline.tokens[:] = self._ask_again(prompt, n_out)
        return answers

    def forget(self) -> None:
        """Empty the slots, so that nothing has to be moved out of them for new prompts."""
        for slot in range(self._n_slots):
            with self._connected() as connection:
                connection.request("POST", f"/slots/{slot}?action=erase")
                _check(connection.getresponse()).read()

    def describe(self) -> dict[str, Any]:
        """Version and settings, for the record."""
        unsaid = ("model.path", "slot_save_path", "verbosity")
        return {"xllamacpp": self.version} | {key: one for key, one in self._params.items() if key not in unsaid}

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(self._netloc, timeout=JOB_TIMEOUT_S)
        connection.connect()
        sock = connection.sock
        try:
            yield connection
        finally:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # ends a thread that still reads
            connection.close()

    def _ask_again(self, prompt: list[int], n_out: int) -> list[int]:
        """All tokens of an answer; its stream leaves those out that end within a character."""
        with self._connected() as connection:
            response = _post(connection, _request(prompt, n_out, stream=False, return_tokens=True))
            tokens: list[int] = json.loads(response.read())["tokens"]
        return tokens


def _request(prompt: list[int], n_out: int, **more: Any) -> bytes:
    greedy = {"temperature": 0.0, "top_k": 1, "ignore_eos": True, "n_predict": n_out}
    return json.dumps({"prompt": prompt, **greedy, **more}).encode()


def _complete(connection: HTTPConnection, prompt: list[int], *, n_out: int, cache_prompt: bool) -> Answer:
    timeline = Timeline(time.perf_counter())
    response = _post(connection, _request(prompt, n_out, stream=True, cache_prompt=cache_prompt))
    event: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if tokens := event.get("tokens"):
            timeline.arrivals_s.append(time.perf_counter())
            timeline.counts.append(len(tokens))
            timeline.tokens += tokens
    timeline.ended_s = time.perf_counter()
    if not event.get("stop") or event["tokens_predicted"] != n_out:
        raise LlamaqError(f"llama-server's answer is not one of {n_out} tokens: {event}")
    timings = event["timings"]
    return Answer(timeline, timings["cache_n"] + timings["prompt_n"], timings["cache_n"])


def _post(connection: HTTPConnection, body: bytes) -> HTTPResponse:
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    return _check(connection.getresponse())


def _check(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:
        raise LlamaqError(f"llama-server answered {response.status}: {response.read().decode(errors='replace')[:500]}")
    return response


@contextmanager
def llama_server(settings: WorkerSettings) -> Iterator[LlamaServer | None]:
    """llama-server with these settings of a worker; None where `LLAMAQ_BENCH_PEER` names no python."""
    python = os.environ.get(PYTHON)
    if not python:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        params = _params(settings, folder)
        process = _start(python, log)
        try:
            yield LlamaServer(**_await_ready(process, params, log), params=params)
        finally:
            _stop(process)


def _start(python: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [python, str(Path(__file__).with_name("llama_server_main.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes to the benchmark, which ends it by closing its standard input
        )
    except OSError as exc:
        raise LlamaqError(f"{PYTHON} names no python: {exc}") from exc


def _params(settings: WorkerSettings, folder: str) -> dict[str, Any]:
    return {
        "model.path": settings.model,
        "n_ctx": settings.n_ctx,
        "n_batch": settings.batch_budget,
        "n_ubatch": settings.n_ubatch,
        "n_parallel": settings.n_parallel,
        "kv_unified": True,
        # its defaults
        "cache_prompt": True,
        "cache_ram_mib": 8192,
        "cache_idle_slots": True,
        "n_cache_reuse": 0,
        "slot_prompt_similarity": 0.1,
        "cont_batching": True,
        # as a worker has it
        "cpuparams.n_threads": settings.n_threads,
        "cpuparams_batch.n_threads": settings.n_threads,
        "n_gpu_layers": settings.n_gpu_layers,
        "fit_params": False,  # n_ctx and n_gpu_layers as they are set
        "n_threads_http": 64,  # no request waits for another to end
        "slot_save_path": folder + os.sep,  # without it slots cannot be erased
        "verbosity": 1,
    }


def _await_ready(process: subprocess.Popen[bytes], params: dict[str, Any], log: BinaryIO) -> dict[str, str]:
    """Where it listens, and its version."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a process without its pipes")
    process.stdin.write(json.dumps(params).encode() + b"\n")
    process.stdin.flush()
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        log.seek(0)
        raise LlamaqError(f"llama-server does not start: {log.read().decode(errors='replace')[-2000:]}")
    ready: dict[str, str] = json.loads(line)
    return ready


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
