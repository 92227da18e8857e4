"""A streamed response survives the death of its worker, and then that of the HTTP server that streams it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment

WORDS = " ".join(str(number) for number in range(45))
GRAMMAR = f'root ::= "{WORDS}"'
"""It allows one text only, so every undisturbed run has this text."""


def start_server(environment: Environment) -> tuple[Command, str]:
    variables = {"LLAMAQ_REDIS_URL": environment.redis_url, "LLAMAQ_QUEUE": environment.queue}
    server = environment.start("serve", "--http-port", "0", **variables)
    return server, server.await_output(r"http\.ready url=(http://\S+)")[1]


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_has_the_text_of_an_undisturbed_run_after_the_death_of_worker_and_server(
    environment: Environment,
) -> None:
    pace: Any = {"TICK_S": "0.02", "LINGER_TOKENS": "70"}  # 80 of the 124 characters have 70 tokens
    worker = environment.start_worker(**pace)
    (first, first_url), (_, second_url) = start_server(environment), start_server(environment)
    body = {"input": "Count", "grammar": GRAMMAR, "stream": True, "background": True}
    text, last, response_id, killed = "", -1, "", False
    with httpx.stream("POST", f"{first_url}/v1/responses", json=body, timeout=60) as answer:
        for event in events_of(answer):
            last = event["sequence_number"]
            response_id = response_id or event["response"]["id"]
            text += event.get("delta", "")
            if not killed and len(text) > 20:
                worker.signal(signal.SIGKILL)
                environment.start_worker(**pace)
                killed = True
            if len(text) > 80:
                first.signal(signal.SIGKILL)
                break
    environment.let_jobs_finish()
    assert WORDS.startswith(text)
    assert len(text) < len(WORDS)
    params: dict[str, Any] = {"stream": "true", "starting_after": last}
    with httpx.stream("GET", f"{second_url}/v1/responses/{response_id}", params=params, timeout=60) as answer:
        events = list(events_of(answer))
    assert text + "".join(event.get("delta", "") for event in events) == WORDS
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == WORDS
