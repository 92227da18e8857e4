"""A job survives the death of its worker and of Redis: its stream has no gap, no repeat, and one terminal event."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from tests.lifecycle.conftest import wait_until

from llamaq.common.protocol.job_events import Started, Tokens
from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import Client, Job, JobNotFound, Result
from llamaq.worker.engine.model_files import demo_model_path
from llamaq.worker.local.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Read

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a girl named Mia.",
    "Once upon a time there was a little fox named Finn.",
)
COUNTING = 'root ::= ("one " "two " "three "){160,} "go"'
"""All tokens of its first 480 words are forced."""
N_PAINTED = 12
PAINTED = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"painted_object": {"enum": ["house", "boat", "fence"]}, "main_color": {"enum": ["red", "blue"]}},
        "required": ["painted_object", "main_color"],
        "additionalProperties": False,
    },
    "minItems": N_PAINTED,
    "maxItems": N_PAINTED,
}
"""Most tokens of its outputs are forced."""
N_FORCED = 480
"""Tokens of the constrained jobs: 30 ticks or more, since a tick computes up to 16 forced tokens of a job."""
MAX_TOKENS = 110
NOISE = 0.025
"""How much the gap between the two best logits may change with the shape of the batch, in standard deviations of the
logits."""
LEASE_S = 1.0
SLACK_S = 30.0
"""Extra time for the search for lost jobs, for generating the remaining tokens, and for a very busy machine."""


def submit_stories(client: Client, *, stream: bool = True) -> list[Job]:
    return [client.submit(prompt, max_tokens=MAX_TOKENS, temperature=0, stream=stream) for prompt in PROMPTS]


def assert_equal_up_to_near_ties(client: Client, prompt: str, result: Result, undisturbed: Result) -> None:
    """Assert that two results are equal, or first differ where two tokens are almost equally likely."""
    pairs = zip(result.tokens, undisturbed.tokens, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        assert len(result.tokens) == len(undisturbed.tokens)
        return
    tokens = [*client.tokenizer().encode(prompt), *result.tokens[:place]]
    assert gap_between_best_two(tokens) < NOISE, f"{prompt!r} differs at token {place}"


def gap_between_best_two(tokens: list[int]) -> float:
    """Return the gap between the two best logits after these tokens, in standard deviations of the logits."""
    llama = llama_cpp.Llama(str(demo_model_path()), n_ctx=1024, n_threads=1, logits_all=True, verbose=False)
    llama.eval(tokens)
    logits = np.array(llama.scores[len(tokens) - 1])
    llama.close()
    second, best = np.partition(logits, -2)[-2:]
    return float((best - second) / logits.std())


def kill_process(worker: Command) -> None:
    worker.signal(signal.SIGKILL)
    worker.end()


def attempts_of(environment: Environment, job: Job) -> list[str]:
    """Return the workers that started the job, in order."""
    return [event.worker for event in environment.events_of(job) if isinstance(event, Started)]


def test_another_worker_continues_the_streams_of_a_killed_worker_at_the_next_token(
    environment: Environment, read: Read
) -> None:
    first = environment.start_worker("--n-parallel", "8", LINGER_TOKENS="30")
    with environment.client() as client:
        readers = [read(job) for job in submit_stories(client)]
        drawn = read(client.submit(PROMPTS[0], max_tokens=MAX_TOKENS, seed=11, ignore_eos=True))
        steered = read(client.submit(PROMPTS[0], max_tokens=MAX_TOKENS, seed=11, ignore_eos=True, mirostat=2))
        constrained = read(client.submit("Count:", max_tokens=N_FORCED, grammar=COUNTING, temperature=2))
        structured = read(client.submit("Objects:", max_tokens=2 * N_FORCED, json_schema=PAINTED, temperature=2))
        for reader in (*readers, drawn, steered, constrained, structured):
            reader.await_tokens(8)
        kill_process(first)
        second = environment.start_worker("--n-parallel", "8")
        ready_s = time.monotonic()
        results = [reader.finish() for reader in readers]
        assert time.monotonic() - ready_s < LEASE_S + SLACK_S
        assert len(drawn.finish().tokens) == MAX_TOKENS
        assert len(steered.finish().tokens) == MAX_TOKENS
        stored = [event for event in environment.events_of(steered.job) if isinstance(event, Tokens)]
        assert sum(len(event.draws) for event in stored) == MAX_TOKENS, "the second worker did not get the state"
        counted, objects = constrained.finish(), structured.finish()

        for reader in (*readers, drawn, steered, constrained, structured):
            attempts = attempts_of(environment, reader.job)
            assert (attempts[0], attempts[-1]) == (first.worker_id, second.worker_id)
        assert len(counted.tokens) == N_FORCED
        assert ("one two three " * N_FORCED).startswith(counted.text)
        assert objects.finish_reason == "stop", "a token was lost or repeated where the first worker ended"
        assert list(map(tuple, json.loads(objects.text))) == [("painted_object", "main_color")] * N_PAINTED
        undisturbed = [job.result() for job in submit_stories(client)]
        for prompt, result, other in zip(PROMPTS, results, undisturbed, strict=True):
            assert_equal_up_to_near_ties(client, prompt, result, other)


def test_jobs_without_per_token_events_continue_after_their_last_checkpoint(
    environment: Environment, read: Read
) -> None:
    checkpoints = ("--checkpoint-tokens", "20", "--checkpoint-s", "1000")
    with environment.client() as client:
        jobs = submit_stories(client, stream=False)
        reader = read(jobs[0])
        first = environment.start_worker(*checkpoints, LINGER_TOKENS="50")
        wait_until(lambda: min(job.status().generated_tokens for job in jobs) >= 40, "each job has two checkpoints")
        kill_process(first)
        second = environment.start_worker(*checkpoints)
        results = [job.result() for job in jobs]
        assert reader.finish() == results[0], "the reader did not receive every token exactly once"
        for job, result in zip(jobs, results, strict=True):
            assert attempts_of(environment, job) == [first.worker_id, second.worker_id]
            events = environment.events_of(job)
            again = next(
                place for place, event in enumerate(events) if isinstance(event, Started) and event.attempt > 1
            )
            stored = [event.tokens for event in events[:again] if isinstance(event, Tokens)]
            assert sum(stored, ()) == result.tokens[: sum(map(len, stored))]
            assert 40 <= sum(map(len, stored)) < len(result.tokens)
            assert all(len(tokens) >= 20 for tokens in stored), "tokens were stored between two checkpoints"
        undisturbed = [job.result() for job in submit_stories(client)]
        for prompt, result, other in zip(PROMPTS, results, undisturbed, strict=True):
            assert_equal_up_to_near_ties(client, prompt, result, other)


def test_each_token_of_a_prompt_has_one_probability_after_the_kill_of_a_worker(
    environment: Environment, read: Read
) -> None:
    """One job has generated tokens when its worker dies, and the other one is in the middle of its prompt."""
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "prompt_logprobs": 2, "ignore_eos": True}
    long = " ".join(PROMPTS * 12)
    with environment.client() as client:
        first = environment.start_worker("--chunk-size", "16", "--n-batch", "32", LINGER_TOKENS="30")
        reader = read(client.submit(PROMPTS[2], **options))
        reader.await_tokens(8)
        chunks = client.stream(long, prompt_progress=True, **options | {"max_tokens": 3})
        progress = next(chunk.progress for chunk in chunks if chunk.progress and chunk.progress.processed_tokens)
        kill_process(first)
        assert progress.processed_tokens < progress.total_tokens / 2
        second = environment.start_worker("--chunk-size", "16")
        scored = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
        result = reader.finish()
        assert attempts_of(environment, reader.job) == [first.worker_id, second.worker_id]
        undisturbed = [client.generate(prompt, **options | {"max_tokens": 0}) for prompt in (long, PROMPTS[2])]
    assert len(scored) == 1
    for found, other in zip((scored[0], result.prompt_logprobs), undisturbed, strict=True):
        assert found is not None
        assert other.prompt_logprobs is not None
        assert found.tokens == other.prompt_logprobs.tokens
        values = [[entry.logprob for entry in each if entry is not None] for each in (found, other.prompt_logprobs)]
        assert values[0] == pytest.approx(values[1], abs=0.2)


def test_a_job_survives_the_kill_of_three_workers_in_a_row(environment: Environment, read: Read) -> None:
    with environment.client() as client:
        workers = [environment.start_worker(LINGER_TOKENS="100")]
        reader = read(client.submit(PROMPTS[0], max_tokens=150, ignore_eos=True, temperature=0))
        for _ in range(3):
            reader.await_tokens(reader.n_tokens + 10)
            kill_process(workers[-1])
            workers.append(environment.start_worker(LINGER_TOKENS="100"))
        environment.let_jobs_finish()
        assert len(reader.finish().tokens) == 150
        assert attempts_of(environment, reader.job) == [worker.worker_id for worker in workers]


def test_a_job_that_is_cancelled_after_its_worker_died_has_the_text_of_all_its_tokens(
    environment: Environment, read: Read
) -> None:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    with environment.client() as client:
        worker = environment.start_worker()
        whole = client.generate(PROMPTS[0], **options)
        kill_process(worker)
        worker = environment.start_worker(LINGER_TOKENS="20")
        reader = read(client.submit(PROMPTS[0], stop=[f"{whole.text[:255]}!"], **options))
        reader.await_tokens(8)
        assert reader.text == "", "the stop string does not withhold the text"
        kill_process(worker)
        wait_until(lambda: client.queue_depth().waiting, "the lease of the dead worker has expired")
        reader.job.cancel()
        result = reader.finish()
        assert len(result.tokens) >= 8
        assert result.text == client.tokenizer().decode(result.tokens)


def test_a_worker_that_lost_its_lease_while_stopped_writes_nothing_after_it_continues(
    environment: Environment, read: Read
) -> None:
    first = environment.start_worker()
    with environment.client() as client:
        reader = read(client.submit(PROMPTS[0], max_tokens=1900, ignore_eos=True, temperature=0))
        reader.await_tokens(10)
        first.signal(signal.SIGSTOP)
        n_before = reader.n_tokens
        second = environment.start_worker()
        reader.await_tokens(n_before + 20)
        first.signal(signal.SIGCONT)
        first.await_output("job.lost")
        assert reader.job.status().state is JobState.RUNNING, "the job ended before the first worker continued"
        reader.await_tokens(reader.n_tokens + 20)
        reader.job.cancel()
        result = reader.finish()

        assert result.stats.worker == second.worker_id
        assert attempts_of(environment, reader.job) == [first.worker_id, second.worker_id]
        assert client.workers() != ()
        kill_process(second)
        assert client.generate(PROMPTS[0], max_tokens=5).stats.worker == first.worker_id, (
            "the first worker does not run jobs again"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_streams_continue_after_a_restart_of_redis(
    environment: Environment, read: Read, folder: Path, free_port: int, number: signal.Signals
) -> None:
    server = EmbeddedRedis(port=free_port, data_dir=folder / "data")
    server.start()
    environment.redis_url = server.url
    worker = environment.start_worker(LINGER_TOKENS="100")
    with environment.client() as client:
        readers = [read(client.submit(prompt, max_tokens=150, ignore_eos=True, temperature=0)) for prompt in PROMPTS]
        late = client.submit(PROMPTS[0], max_tokens=120, ignore_eos=True, stream=False)
        for reader in readers:
            reader.await_tokens(10)
        assert server.pid is not None
        os.kill(server.pid, number)
        worker.await_output("redis_error")
        server.stop()
        with EmbeddedRedis(port=free_port, data_dir=folder / "data"):
            environment.let_jobs_finish()
            results = [reader.finish() for reader in readers]
            assert [len(result.tokens) for result in results] == [150] * 3
            assert len(late.result().tokens) == 120
            for reader in readers:
                assert attempts_of(environment, reader.job) == [worker.worker_id] * len(
                    attempts_of(environment, reader.job)
                )
            assert client.generate(PROMPTS[0], max_tokens=5).stats.worker == worker.worker_id
            worker.signal(signal.SIGTERM)
            assert worker.end() == 0


def test_worker_and_client_keep_working_after_redis_lost_all_data(
    environment: Environment, read: Read, free_port: int
) -> None:
    server = EmbeddedRedis(port=free_port)
    server.start()
    environment.redis_url = server.url
    worker = environment.start_worker()
    with environment.client() as client:
        reader = read(client.submit(PROMPTS[0], max_tokens=2000, ignore_eos=True))
        reader.await_tokens(10)
        server.stop()
        with EmbeddedRedis(port=free_port):
            with pytest.raises(JobNotFound):
                reader.finish()
            worker.await_output("job.lost")
            assert len(client.generate(PROMPTS[0], max_tokens=5).tokens) > 0
            worker.signal(signal.SIGTERM)
            assert worker.end() == 0


def test_the_lease_of_a_job_is_renewed_while_its_grammar_is_compiled(environment: Environment, read: Read) -> None:
    worker = environment.start_worker()
    with environment.client() as client:
        client.generate("Count:", max_tokens=4, grammar=COUNTING)
        (child,) = (pid for pid, line in environment.running_processes().items() if "grammar.sandbox_process" in line)
        os.kill(child, signal.SIGSTOP)
        reader = read(client.submit("Count:", max_tokens=10, grammar='root ::= "four " "five"'))
        time.sleep(2.5 * LEASE_S)  # longer than the lease
        os.kill(child, signal.SIGCONT)
        assert reader.finish().text == "four five"
        assert attempts_of(environment, reader.job) == [worker.worker_id]
