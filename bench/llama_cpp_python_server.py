"""llama-cpp-python's own server, `llama_cpp.server`, called over HTTP with texts.

It computes one request at a time, and the others wait. By default, a new request ends the stream of the one before it
(`--interrupt_requests`), which is switched off here. The server does not keep the logits of prompts
(`--logits_all false`), whose array would have 5 GB. It takes no token ids, so the prompts are texts of random tokens.
It does not count the tokens of a stream, but a stream that ends by its length has the wanted number of tokens.

A JSON schema becomes a grammar with llama-cpp-python's own converter, because only chats take a schema.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from harness import JOB_TIMEOUT_S, note
from job_timings import Timeline
from llamaq.common.errors import LlamaqError
from llamaq.worker.settings import WorkerSettings
from server_process import HOST, free_port, start_process

PYTHON_SERVER = "llama-cpp-python"
"""Name of this server among the systems."""
PYTHON_VARIABLE = "LLAMAQ_BENCH_PYTHON_SERVER"
"""Environment variable: the python of an environment with `llama-cpp-python[server]`. `make bench-peers` installs such
a python and sets the variable."""
COMMON_OPTIONS = {"stream": True, "repeat_penalty": 1.0}
"""The default penalty is 1.1, which no other system has."""


class PythonServer:
    """A running `llama_cpp.server`.

    Args:
        port: The port at which it listens.
        about: Version and settings.
        end_tokens: The tokens that would end an output. They get a large negative bias.
    """

    def __init__(self, port: int, about: dict[str, Any], end_tokens: Sequence[int]) -> None:
        self._port = port
        self.about = about
        self._bias = {str(token): -100.0 for token in end_tokens}

    def generate(self, prompts: Sequence[str], n_out: int, options: Mapping[str, Any]) -> list[Timeline]:
        """Send all prompts at once and stream the answers, each of `n_out` tokens."""
        body = {"max_tokens": n_out, "logit_bias": self._bias, **COMMON_OPTIONS, **options}
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(partial(self._complete, body), prompts))

    def _complete(self, body: Mapping[str, Any], prompt: str) -> Timeline:
        with closing(HTTPConnection(HOST, self._port, timeout=JOB_TIMEOUT_S)) as connection:
            connection.connect()
            return self._follow(connection, body, prompt)

    def _follow(self, connection: HTTPConnection, body: Mapping[str, Any], prompt: str) -> Timeline:
        timeline = Timeline(time.perf_counter())
        message = json.dumps({"prompt": prompt, **body}).encode()
        connection.request("POST", "/v1/completions", message, {"Content-Type": "application/json"})
        response, choice = connection.getresponse(), {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "choices" not in event:
                raise LlamaqError(f"{PYTHON_SERVER} answered with an error: {event}")
            (choice,) = event["choices"]
            if choice["finish_reason"] is None:
                timeline.arrivals_s.append(time.perf_counter())
                timeline.counts.append(1)
        timeline.ended_s = time.perf_counter()
        if choice.get("finish_reason") != "length":
            raise LlamaqError(f"{PYTHON_SERVER} answered {response.status}, and not all tokens: {choice}")
        timeline.counts[-1] += body["max_tokens"] - sum(timeline.counts)  # no event ends inside a character
        return timeline


def schema_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request whose output a JSON schema constrains."""
    return {"grammar": json_schema_to_gbnf(json.dumps(schema))}


@contextmanager
def start_python_server(settings: WorkerSettings, end_tokens: Sequence[int]) -> Iterator[PythonServer | None]:
    """Start the server with a worker's settings. Yields None where `LLAMAQ_BENCH_PYTHON_SERVER` is not set."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        note(f"{PYTHON_SERVER}'s server is not compared: {PYTHON_VARIABLE} is not set (`make bench-peers` sets it).")
        yield None
        return
    options = {
        "n_ctx": settings.n_ctx,
        "n_batch": settings.batch_budget,
        "n_ubatch": settings.ubatch_tokens,
        "n_threads": settings.n_threads_alone,
        "n_threads_batch": settings.n_threads_alone,
        "n_gpu_layers": settings.n_gpu_layers,
        "logits_all": "false",
        "interrupt_requests": "false",
    }
    port = free_port()
    command = [python, "-m", "llama_cpp.server"]
    for name, value in {"model": settings.model, "host": HOST, "port": port, **options}.items():
        command += [f"--{name}", str(value)]
    try:
        started = start_process(PYTHON_SERVER, command)
    except OSError as exc:
        raise LlamaqError(f"{PYTHON_VARIABLE} names no python: {exc}") from exc
    with started as server:
        server.await_answer(port, "/v1/models")
        yield PythonServer(port, {PYTHON_SERVER: _version(python), **options}, end_tokens)


def _version(python: str) -> str:
    code = f"from importlib.metadata import version; print(version('{PYTHON_SERVER}'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
