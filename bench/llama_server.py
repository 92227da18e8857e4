"""llama-server, started from the `xllamacpp` wheel. It is called over HTTP with token ids, as workers are.

llama-server gets the model file, threads, context size and number of slots of a worker. It also gets `--kv-unified`,
so that a slot can use the cells that other slots do not use. All other settings are its defaults: prompts are cached,
8 GiB of host memory hold the states of slots, the cells of idle slots move to host memory when other slots
need room, the slot prompt similarity is 0.1, and shifted chunks are not reused (`--cache-reuse 0`).

Requests are greedy with top-k 1. This is the fastest of the sampler settings that were tried: 1.16 ms per token with a
vocabulary of 151,936 tokens, against 1.3 ms with the default samplers, 1.25 ms with top-k alone and 1.9 ms with
`backend_sampling`. The model takes nearly all of this time.

The wheel's build for Linux on x86-64 stops at AVX2. A worker's llama.cpp is built for the CPU that it runs on.
Therefore the benchmarks also compare the two systems in cases where no cached token can be reused.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from harness import JOB_TIMEOUT_S, START_TIMEOUT_S
from job_timings import Answer, Timeline
from llamaq.common.errors import LlamaqError
from llamaq.worker.settings import WorkerSettings

PYTHON_VARIABLE = "LLAMAQ_BENCH_PEER"
"""Environment variable with the path of a python that has xllamacpp. `make bench-peers` installs one and sets it."""
STOP_TIMEOUT_S = 10.0


class LlamaServer:
    """A running llama-server, called over HTTP."""

    def __init__(self, address: str, version: str, params: dict[str, Any]) -> None:
        self.url = address
        self._netloc = urlsplit(address).netloc
        self._params = params
        self._n_slots: int = params["n_parallel"]
        self.version = version

    def generate(
        self,
        prompts: Sequence[list[int]],
        n_out: int,
        *,
        cache_prompt: bool = True,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Answer]:
        """Send all prompts at once and stream the answers. All connections are open before the first prompt is sent.

        Decoding is greedy, unless `options` of the request say otherwise.
        """
        with ThreadPoolExecutor(len(prompts)) as threads, ExitStack() as exits:
            connections = [exits.enter_context(self._connected()) for _ in prompts]
            complete = partial(_complete, n_out=n_out, options={"cache_prompt": cache_prompt, **options})
            answers = list(threads.map(complete, connections, prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            if len(answer.timeline.tokens) < n_out and not options:
                answer.timeline.tokens[:] = self._generate_again(prompt, n_out)
        return answers

    def clear_cache(self) -> None:
        """Erase all slots. Then no new prompt causes llama-server to move old cells to host memory."""
        for slot in range(self._n_slots):
            with self._connected() as connection:
                connection.request("POST", f"/slots/{slot}?action=erase")
                _check(connection.getresponse()).read()

    def describe(self) -> dict[str, Any]:
        """Return version and settings."""
        omitted = ("model.path", "slot_save_path", "verbosity")
        return {"xllamacpp": self.version} | {key: one for key, one in self._params.items() if key not in omitted}

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(self._netloc, timeout=JOB_TIMEOUT_S)
        connection.connect()
        sock = connection.sock
        try:
            yield connection
        finally:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # unblocks a thread that still reads from the connection
            connection.close()

    def _generate_again(self, prompt: list[int], n_out: int) -> list[int]:
        """Generate again without a stream and return all tokens. A stream omits tokens that end inside a character."""
        with self._connected() as connection:
            response = _post(connection, _request(prompt, n_out, stream=False, return_tokens=True))
            tokens: list[int] = json.loads(response.read())["tokens"]
        return tokens


def _request(prompt: list[int], n_out: int, **more: Any) -> bytes:
    greedy = {"temperature": 0.0, "top_k": 1, "ignore_eos": True, "n_predict": n_out}
    return json.dumps({"prompt": prompt, **greedy, **more}).encode()


def _complete(connection: HTTPConnection, prompt: list[int], *, n_out: int, options: Mapping[str, Any]) -> Answer:
    timeline = Timeline(time.perf_counter())
    response = _post(connection, _request(prompt, n_out, stream=True, **options))
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
        raise LlamaqError(f"llama-server did not answer with {n_out} tokens: {event}")
    timeline.counts[-1] += n_out - sum(timeline.counts)  # a stream omits tokens that end inside a character
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
def start_llama_server(settings: WorkerSettings) -> Iterator[LlamaServer | None]:
    """Start llama-server with a worker's settings. Yields None where `LLAMAQ_BENCH_PEER` is not set."""
    python = os.environ.get(PYTHON_VARIABLE)
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
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which closes the standard input
        )
    except OSError as exc:
        raise LlamaqError(f"{PYTHON_VARIABLE} does not name a python: {exc}") from exc


def _params(settings: WorkerSettings, folder: str) -> dict[str, Any]:
    return {
        "model.path": settings.model,
        "n_ctx": settings.n_ctx,
        "n_batch": settings.batch_budget,
        "n_ubatch": settings.ubatch_tokens,
        "n_parallel": settings.n_parallel,
        "kv_unified": True,
        # defaults of llama-server
        "cache_prompt": True,
        "cache_ram_mib": 8192,
        "cache_idle_slots": True,
        "n_cache_reuse": 0,
        "slot_prompt_similarity": 0.1,
        "cont_batching": True,
        # settings of the worker
        "cpuparams.n_threads": settings.n_threads_alone,
        "cpuparams_batch.n_threads": settings.n_threads_alone,
        "n_gpu_layers": settings.n_gpu_layers,
        "fit_params": False,  # use n_ctx and n_gpu_layers as they are given
        "n_threads_http": 64,  # one thread for each request, so that no request waits for another
        "slot_save_path": folder + os.sep,  # required to erase slots
        "verbosity": 1,
    }


def _await_ready(process: subprocess.Popen[bytes], params: dict[str, Any], log: BinaryIO) -> dict[str, str]:
    """Return the address and the version."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("llama-server was started without pipes")
    process.stdin.write(json.dumps(params).encode() + b"\n")
    process.stdin.flush()
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        log.seek(0)
        raise LlamaqError(f"llama-server did not start: {log.read().decode(errors='replace')[-2000:]}")
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
