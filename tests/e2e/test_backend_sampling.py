"""Backend sampling through the queue: each kind of job has the same output as on a worker without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.e2e.conftest import DEMO_MODEL

from llamaq.producer import Client, JobOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import StartWorker

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
KINDS: dict[str, JobOptions] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 1},
    "with penalties": {"seed": 2, "repeat_penalty": 1.2, "presence_penalty": 0.3},
    "with DRY": {"seed": 3, "dry_multiplier": 0.8},
    "without end tokens": {"seed": 4, "ignore_eos": True},
    "without top-k": {"seed": 5, "top_k": 0},
    "with log probabilities": {"seed": 6, "logprobs": 2},
    "with a schema": {"seed": 7, "json_schema": SCHEMA},
    "with Mirostat": {"seed": 8, "mirostat": 2},
    "with a bias": {"seed": 9, "logit_bias": {300: 2.0}},
}


@pytest.fixture(scope="module")
def clients(start_worker: StartWorker) -> Iterator[tuple[Client, Client]]:
    """Clients of a worker with backend sampling, and of one without it. Both compute the same batches."""
    queues = [
        start_worker(name, DEMO_MODEL, n_ctx=2048, n_parallel=4, cache_prompt=False, backend_sampling=on)
        for name, on in (("device-samples", True), ("host-samples", False))
    ]
    with queues[0].client() as device, queues[1].client() as host:
        yield device, host


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_does_not_depend_on_where_the_largest_logits_are_found(
    clients: tuple[Client, Client], kind: str
) -> None:
    prompt = "Once upon a time there was a girl. Once upon a time there was a"
    options: JobOptions = {**KINDS[kind], "max_tokens": 40}
    device, host = (client.generate(prompt, **options) for client in clients)
    assert (device.tokens, device.text, device.finish_reason) == (host.tokens, host.text, host.finish_reason)
    assert device.logprobs == host.logprobs


def test_all_kinds_of_jobs_run_beside_each_other(clients: tuple[Client, Client]) -> None:
    device, _ = clients
    limited: list[JobOptions] = [{**options, "max_tokens": 40} for options in KINDS.values()]
    jobs = [device.submit("Tell me a story", **options) for options in limited]
    results = [job.result() for job in jobs]
    assert all(result.finish_reason in ("stop", "length") for result in results)
    assert any(result.tokens for result in results)
