"""Jobs share prefixes, which are computed once and survive a restart. Two tenants share only public tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.workers import only_worker

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.producer import Client, JobFailed, Result
from llamaq.tools.demo_model.fact_questions import recall_probe

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue, StartWorker

DEMO_MODEL = Path(__file__).parents[2] / "worker" / "llamaq" / "worker" / "model" / "llamaq-demo.gguf"
FACTS = recall_probe(5, 300).prompt
"""A prompt of facts with about 330 tokens, and a question at its end."""
SYSTEM = "You remember what you are told. Mia has a red ball. Tom has a blue kite. Lily lives in the castle."


@pytest.fixture(scope="module")
def wide(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker with eight slots and a disk tier."""
    folder = tmp_path_factory.mktemp("cache")
    return start_worker("wide", DEMO_MODEL, n_parallel=8, n_ctx=4096, cache_dir=folder, heartbeat_s=0.1)


@pytest.fixture
def client(wide: ServedQueue) -> Iterator[Client]:
    with wide.client() as client:
        yield client


def computed(result: Result) -> int:
    return result.stats.prompt_tokens - result.stats.prefix_cache_tokens


def test_simultaneous_jobs_compute_their_shared_prefix_once_and_generate_the_text_that_they_generate_alone(
    client: Client, wide: ServedQueue
) -> None:
    prompts = [
        f"{FACTS} The {animal} is happy." for animal in ("dog", "cat", "fox", "bear", "bird", "frog", "duck", "cow")
    ]
    jobs = [client.submit(prompt, max_tokens=12, temperature=0) for prompt in prompts]
    together = [job.result(timeout=60) for job in jobs]
    n_shared = min(result.stats.prompt_tokens for result in together) - 8
    assert sum(map(computed, together)) <= n_shared + sum(result.stats.prompt_tokens - n_shared for result in together)
    assert sum(result.stats.prefix_cache_tokens >= n_shared for result in together) >= 7
    alone = [
        client.submit(prompt, max_tokens=12, temperature=0, cache_prompt=False).result(timeout=60) for prompt in prompts
    ]
    assert [result.text for result in together] == [result.text for result in alone]
    assert {result.stats.prefix_cache_tokens for result in alone} == {0}


def test_a_conversation_reuses_all_its_earlier_turns(client: Client) -> None:
    messages = [{"role": "user", "content": "My dog is called Rex. My cat is called Tim."}]
    for turn in range(3):
        result = client.submit(messages=messages, max_tokens=16, temperature=0, cache_salt="talk").result(timeout=60)
        if turn:
            # Only the new question is computed, with the text of the chat template before it.
            assert computed(result) <= 16
        messages += [
            {"role": "assistant", "content": result.text},
            {"role": "user", "content": "What is my dog called?"},
        ]


def test_two_salts_share_only_tokens_that_both_declare_public(client: Client) -> None:
    def ask(salt: str, public: object = 0) -> Result:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What does Tom have?"}]
        job = client.submit(messages=messages, max_tokens=4, cache_salt=salt, cache_public=public)  # type: ignore[arg-type]
        return job.result(timeout=60)

    assert ask("tenant a").stats.prefix_cache_tokens == 0
    assert ask("tenant b").stats.prefix_cache_tokens == 0
    assert ask("tenant a").stats.prefix_cache_tokens > 30
    assert ask("tenant c", "system").stats.prefix_cache_tokens == 0  # tenants a and b declare no tokens public
    shared = ask("tenant d", "system").stats
    assert 20 < shared.prefix_cache_tokens < shared.prompt_tokens - 6  # only the system message is shared


def test_a_job_can_request_a_slot(client: Client) -> None:
    assert client.generate("Once", max_tokens=2, slot=5).stats.slot == 5
    with pytest.raises(JobFailed, match="slots 0 to 7"):
        client.generate("Once", max_tokens=2, slot=8)


def test_the_snapshot_of_a_worker_shows_its_cache(client: Client, wait_for: Await) -> None:
    client.generate(FACTS, max_tokens=4)
    wait_for(lambda: only_worker(client).cache.entries > 0)  # the next heartbeat shows it
    worker = only_worker(client)
    assert 0 < worker.cache.used_cells <= worker.cache.n_cells


def test_prefixes_survive_a_restart_on_disk(
    start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    texts = []
    for life in range(2):
        served = start_worker(f"life{life}", DEMO_MODEL, cache_dir=folder)
        with served.client() as client:
            result = client.generate(FACTS, max_tokens=12, temperature=0)
            texts.append(result.text)
            assert (result.stats.prefix_cache_tier is CacheTier.DISK) == (life == 1)
            assert computed(result) == (1 if life else result.stats.prompt_tokens)
        served.process.terminate()
        assert served.process.wait(30) == 0
    assert texts[0] == texts[1]
