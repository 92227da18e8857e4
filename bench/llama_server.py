"""llama-server, called over HTTP with token ids, as workers are.

llama-server gets the model file, threads, context size and number of slots of a worker. It also gets `--kv-unified`,
so that a slot can use the cells that other slots do not use. All other settings are its defaults: prompts are cached,
8 GiB of host memory hold the states of slots, the cells of idle slots move to host memory when other slots
need room, the slot prompt similarity is 0.1, and shifted chunks are not reused (`--cache-reuse 0`).

Requests are greedy with top-k 1. This is the fastest of the sampler settings that were tried: 1.16 ms per token with a
vocabulary of 151,936 tokens, against 1.3 ms with the default samplers, 1.25 ms with top-k alone and 1.9 ms with
`backend_sampling`. The model takes nearly all of this time.

The build of the `xllamacpp` wheel for Linux on x86-64 stops at AVX2. A worker's llama.cpp is built for the CPU that it
runs on. Therefore the benchmarks also compare the two systems in cases where no cached token can be reused.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from harness import JOB_TIMEOUT_S
from job_timings import Answer, Timeline
from llama_server_process import PEER_VARIABLE, run_llama_server
from llamaq.common.errors import LlamaqError
from llamaq.worker.settings import WorkerSettings


class LlamaServer:
    """A running llama-server, called over HTTP."""

    def __init__(self, address: str, about: dict[str, Any], n_slots: int) -> None:
        self.url = address
        self._netloc = urlsplit(address).netloc
        self._about = about
        self._n_slots = n_slots

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
        return self._about

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
    peer = os.environ.get(PEER_VARIABLE)
    if not peer:
        yield None
        return
    with run_llama_server(peer, settings) as (address, about):
        yield LlamaServer(address, about, settings.n_parallel)
