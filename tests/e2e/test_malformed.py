"""Malformed submissions: each ends in a clear error, and the worker serves its other jobs as before.

The client refuses some of them. Others are valid stream entries of jobs whose hash has a mutated request, or stream
entries that name no job. The tests run valid jobs in between.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from tests.support.malformed_jobs import (
    BAD_PROMPTS,
    MAX_REQUEST_BYTES,
    REQUEST,
    garbage,
    mutated_requests,
    out_of_bounds,
)

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, JobId, Keys
from llamaq.producer import Client, InvalidRequest, JobFailed
from llamaq.tools.random_gguf import PLAIN, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue, StartWorker

N_BAD_PARAMETERS, N_MUTATED, N_GARBAGE = 2500, 1500, 1500
PER_EXAMPLE = 25
"""Number of bad requests per Hypothesis example, because drawing an example takes longer than a submit."""
GOOD_EVERY = 250
KEYS = Keys()


@pytest.fixture(scope="module")
def sturdy(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker for this module alone. Its small context limits the cost of a mutated `max_tokens`."""
    model = write_model(tmp_path_factory.mktemp("models") / "sturdy.gguf", PLAIN, seed=3)
    return start_worker(
        "sturdy", model, n_ctx=256, max_request_bytes=MAX_REQUEST_BYTES, log_level="warning", lease_s=1.0
    )


@pytest.fixture(scope="module")
def sturdy_client(sturdy: ServedQueue) -> Iterator[Client]:
    with sturdy.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def redis(sturdy: ServedQueue) -> Iterator[Redis]:
    with Redis.from_url(sturdy.url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def check_worker_after_test(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await
) -> Iterator[None]:
    """Check after each test: the process is the same, the streams are empty, and a valid job has the same output."""

    def good() -> Any:
        return sturdy_client.generate("the world", max_tokens=20, temperature=0).tokens

    before = good()
    (worker,) = sturdy_client.workers()
    yield
    wait_for(lambda: all(redis.xlen(stream) == 0 for stream in streams(sturdy)))
    wait_for(lambda: all(pending(redis, stream) == 0 for stream in streams(sturdy)))
    assert sturdy.is_running
    assert [one.card.pid for one in sturdy_client.workers()] == [worker.card.pid]
    assert good() == before
    assert "Traceback" not in sturdy.log
    assert "never retrieved" not in sturdy.log


def streams(served: ServedQueue) -> list[str]:
    return [KEYS.jobs(served.queue, 0, priority) for priority in Priority]


def pending(redis: Redis, stream: str) -> int:
    return int(redis.xpending(stream, GROUP)["pending"])


def count_jobs(redis: Redis) -> int:
    return sum(1 for _ in redis.scan_iter("*:job:*", count=1000))


# ---- requests that the client refuses


@pytest.mark.parametrize(("named", "arguments"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_an_invalid_prompt_is_refused_by_the_client(
    sturdy_client: Client, named: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        sturdy_client.submit(**arguments)


def test_an_invalid_parameter_is_refused_by_the_client_with_its_name(sturdy_client: Client, redis: Redis) -> None:
    refused: Counter[str] = Counter()

    @settings(
        max_examples=N_BAD_PARAMETERS // PER_EXAMPLE,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(out_of_bounds(), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def refuse(bad: list[tuple[str, Any]]) -> None:
        for name, value in bad:
            options: Any = {name: value}
            with pytest.raises(InvalidRequest, match=name):
                sturdy_client.submit("the world", **options)
            refused[name] += 1

    n_jobs = count_jobs(redis)
    refuse()
    assert refused.total() >= N_BAD_PARAMETERS
    assert len(refused) == 27, "a parameter was never tested"
    assert count_jobs(redis) <= n_jobs, "a job was submitted"


# ---- requests that are written to Redis without the client

PLANT = """
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[1])
redis.call('HSET', KEYS[1], 'status', 'queued', 'priority', 'interactive', 'attempt', 0, 'entry', entry,
  'generated', 0, 'ttl_ms', 600000, 'submitted_ms', 1, 'queue_deadline_ms', 0, 'idempotency', '', unpack(ARGV, 2))
"""
"""Adds a job like `submit.lua`, with arbitrary fields of its hash."""


def plant(redis: Any, served: ServedQueue, **fields: Any) -> str:
    """Add a job with these fields to the queue, and return its id. `redis` may be a pipeline."""
    job_id = str(JobId.new(served.queue))
    keys = KEYS.of_job(job_id)
    redis.eval(PLANT, 2, keys.job, keys.interactive, job_id, *(part for pair in fields.items() for part in pair))
    return job_id


def statuses(redis: Redis, job_ids: list[str]) -> Counter[str]:
    with redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(KEYS.of_job(job_id).job, "status")
        return Counter((status or b"none").decode() for status in pipe.execute())


def test_mutated_requests_fail_as_invalid_and_good_jobs_finish(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await
) -> None:
    rng = random.Random(7)
    expected = sturdy_client.generate("the world", max_tokens=8, temperature=0).tokens
    bad, good = [], []
    requests = mutated_requests(rng, N_MUTATED)
    for _ in range(N_MUTATED // GOOD_EVERY):
        with redis.pipeline(transaction=False) as pipe:
            bad += [plant(pipe, sturdy, request=next(requests)) for _ in range(GOOD_EVERY)]
            pipe.execute()
        good.append(sturdy_client.submit("the world", max_tokens=8, temperature=0))
    assert [job.result(timeout=60).tokens for job in good] == [expected] * len(good)
    wait_for(lambda: statuses(redis, bad) == {"failed": N_MUTATED}, 60)
    for job_id in rng.sample(bad, 60):
        with pytest.raises(JobFailed) as failed:
            sturdy_client.job(job_id).result()
        assert failed.value.code == ErrorCode.INVALID_REQUEST
        assert failed.value.message
    with redis.pipeline(transaction=False) as pipe:
        for job_id in bad:
            pipe.hget(KEYS.of_job(job_id).job, "error")
        codes = Counter(codec.decode_event(error).code for error in pipe.execute())  # type: ignore[union-attr]
    assert codes == {ErrorCode.INVALID_REQUEST.value: N_MUTATED}


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        (ErrorCode.INVALID_TOKEN, {"tokens": [2**31 - 1]}),
        (ErrorCode.INVALID_TOKEN, {"prompt": "a", "logit_bias": {2**31 - 1: 1.0}}),
        (ErrorCode.PROMPT_TOO_LONG, {"prompt": "the " * 2000}),
        (ErrorCode.INVALID_GRAMMAR, {"prompt": "a", "grammar": "root ::= (("}),
        (ErrorCode.CHAT_TEMPLATE, {"messages": [{"role": "user", "content": "a"}]}),
        (ErrorCode.INVALID_REQUEST, {"prompt": "a", "seed": None}),
        (ErrorCode.INVALID_REQUEST, None),
    ],
    ids=lambda value: value.value if isinstance(value, ErrorCode) else "",
)
def test_a_request_that_only_the_worker_can_check_fails_with_the_matching_code(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, code: ErrorCode, request_: dict[str, Any] | None
) -> None:
    fields = {} if request_ is None else {"request": msgpack.packb({"seed": 1, **request_})}
    with pytest.raises(JobFailed) as failed:
        sturdy_client.job(plant(redis, sturdy, **fields)).result()
    assert failed.value.code == code


# ---- job hashes that no client writes

FORGED: list[dict[str, Any]] = [
    *({"attempt": value} for value in ("x", "", "9223372036854775807")),
    *({"generated": value} for value in ("x", "", "-3", "5", "1e300", "nan")),
    *({"ttl_ms": value} for value in ("x", "", "-1", "1e300", "9223372036854775807")),
    *({"submitted_ms": value} for value in ("x", "", "-1", "1e300")),
    *({"queue_deadline_ms": value} for value in ("x", "", "nan", "-5")),
    *({"entry": value} for value in ("x", "", "0-1", "99999999999999-0")),
    *({"status": value} for value in ("x", "", "finished", "failed")),
    {"status": "running", "attempt": "3", "generated": "2", "started_ms": "x"},
    {"started_ms": "x"},
    {"idempotency": "x"},
    {"cancel": "x"},
    {"priority": "x"},
    {"finish_reason": b"\xff", "stats": b"\xff", "output": b"\xff", "error": b"\xff"},
]


@pytest.mark.parametrize("fields", FORGED, ids=str)
def test_a_forged_job_hash_leaves_the_queue_and_the_worker_continues(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await, fields: dict[str, Any]
) -> None:
    for _ in range(3):
        plant(redis, sturdy, request=msgpack.packb(REQUEST), **fields)
    good = sturdy_client.submit("the world", max_tokens=8)
    assert good.result(timeout=20).finish_reason is FinishReason.LENGTH
    wait_for(lambda: sturdy_client.queue_depth().running == 0)


@pytest.mark.parametrize("missing", ["attempt", "generated", "ttl_ms", "submitted_ms", "queue_deadline_ms", "entry"])
def test_a_job_hash_without_a_field_leaves_the_queue_and_the_worker_continues(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await, missing: str
) -> None:
    with redis.pipeline(transaction=True) as pipe:
        job_id = plant(pipe, sturdy, request=msgpack.packb(REQUEST))
        pipe.hdel(KEYS.of_job(job_id).job, missing)
        pipe.execute()
    assert sturdy_client.generate("the world", max_tokens=8).finish_reason is FinishReason.LENGTH
    wait_for(lambda: sturdy_client.queue_depth().running == 0)


@pytest.mark.parametrize("part", ["job", "events"])
@pytest.mark.parametrize("kind", ["string", "list", "stream"])
def test_a_key_of_a_wrong_type_does_not_stop_the_worker(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await, part: str, kind: str
) -> None:
    with redis.pipeline(transaction=True) as pipe:
        job_id = plant(pipe, sturdy, request=msgpack.packb(REQUEST))
        key = getattr(KEYS.of_job(job_id), part)
        pipe.delete(key)
        match kind:
            case "string":
                pipe.set(key, "x")
            case "list":
                pipe.lpush(key, "x")
            case _:
                pipe.xadd(key, {"e": b"\xff"})
        pipe.execute()
    assert sturdy_client.generate("the world", max_tokens=8).finish_reason is FinishReason.LENGTH
    wait_for(lambda: sturdy_client.queue_depth().running == 0)
    redis.delete(key)


# ---- stream entries that name no job


def n_dead_lettered(served: ServedQueue) -> int:
    return served.log.count("entry.dead_lettered")


def test_entries_that_name_no_job_become_dead_letters_each_with_its_reason(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await
) -> None:
    rng = random.Random(11)
    before = n_dead_lettered(sturdy)
    good = []
    for _ in range(N_GARBAGE // GOOD_EVERY):
        with redis.pipeline(transaction=False) as pipe:
            for _ in range(GOOD_EVERY):
                pipe.xadd(rng.choice(streams(sturdy)), garbage(rng, sturdy.queue))
            pipe.execute()
        good.append(sturdy_client.submit("the world", max_tokens=8, priority=rng.choice(list(Priority))))
    assert [job.result(timeout=60).stats.generated_tokens for job in good] == [8] * len(good)
    wait_for(lambda: sum(redis.xlen(stream) for stream in streams(sturdy)) == 0)
    assert n_dead_lettered(sturdy) - before == N_GARBAGE
    letters: Any = redis.xrevrange(KEYS.dead(sturdy.queue, 0), count=1000)
    assert len(letters) == 1000
    for _, letter in letters:
        assert letter[b"reason"]
        assert letter[b"stream"].decode() in streams(sturdy)
        assert len(letter[b"held"]) <= 4096
    assert redis.xlen(KEYS.dead(sturdy.queue, 0)) < 1200, "not every entry became a dead letter"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"x": "y"}, "not a job id"),
        ({"id": b"\xff\xfe"}, "not a job id"),
        ({"id": "another.0." + "a" * 32}, "belongs to queue 'another'"),
        ({"id": "sturdy.1." + "a" * 32}, "partition 1"),
        ({"id": "sturdy.0." + "a" * 32}, "does not exist"),
    ],
    ids=["no id", "binary id", "another queue", "another partition", "no such job"],
)
def test_a_dead_letter_has_the_reason(
    sturdy: ServedQueue, redis: Redis, wait_for: Await, entry: dict[Any, Any], reason: str
) -> None:
    entry_id: Any = redis.xadd(streams(sturdy)[0], entry)
    wait_for(lambda: redis.xlen(streams(sturdy)[0]) == 0)
    letters: Any = redis.xrevrange(KEYS.dead(sturdy.queue, 0), count=10)
    (letter,) = [fields for _, fields in letters if fields.get(b"entry") == entry_id]
    assert reason in letter[b"reason"].decode()
    assert all(repr(value.encode()).encode() in letter[b"held"] for value in entry.values() if isinstance(value, str))


def test_a_second_entry_of_the_same_job_is_dropped(sturdy: ServedQueue, sturdy_client: Client, redis: Redis) -> None:
    job = sturdy_client.submit("the world", max_tokens=100)
    for stream in streams(sturdy):
        redis.xadd(stream, {"id": job.id})
    assert job.result().stats.generated_tokens == 100
    assert job.status().attempt == 1
    assert job.status().state is JobState.FINISHED
