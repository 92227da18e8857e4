"""10,000 malformed submissions: each ends in a clear error, and the worker goes on as if nothing had been.

5,000 are refused by the client, 3,000 are job hashes with mutated requests behind valid entries, 2,000 are entries of
the job streams that name no job at all. Good jobs run in between.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from llamaq.common import codec
from llamaq.common.errors import ErrorCode
from llamaq.common.keys import GROUP, JobId, Keys
from llamaq.common.messages import FinishReason, JobState, Priority
from llamaq.producer import Client, InvalidRequest, JobFailed
from llamaq.tools.random_gguf import PLAIN, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue, StartWorker

N_BAD_PARAMETERS, N_MUTATED, N_GARBAGE = 5000, 3000, 2000
PER_EXAMPLE = 25
"""Bad requests that hypothesis makes at once: its own work is what takes the time."""
GOOD_EVERY = 250
KEYS = Keys()
MAX_REQUEST_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def sturdy(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker that this module alone mistreats; its small context bounds what a mutated `max_tokens` can cost."""
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
def the_worker_lives_on(
    sturdy: ServedQueue, sturdy_client: Client, redis: Redis, wait_for: Await
) -> Iterator[None]:
    """After each test: the same process, empty streams, nothing pending, and a good job gives what it gave before."""

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
    return int(redis.xpending(stream, GROUP)["pending"])  # type: ignore[index]


# ---- refused by the client


def out_of_bounds() -> st.SearchStrategy[tuple[str, Any]]:
    """A parameter's name and a value that it cannot have."""
    not_a_number = st.one_of(st.text(alphabet="abc-", min_size=1), st.lists(st.integers(), max_size=2), st.binary())
    too_large = st.floats(min_value=1e10, allow_infinity=True)
    negative = st.floats(max_value=-1e-6, allow_nan=False)
    odd = st.sampled_from([float("nan"), float("inf"), float("-inf")])
    values: dict[str, st.SearchStrategy[Any]] = {
        "max_tokens": st.one_of(st.integers(max_value=0), st.integers(min_value=1_000_001), odd, not_a_number),
        "temperature": st.one_of(negative, too_large, odd, not_a_number),
        "top_k": st.one_of(st.integers(max_value=-1), st.integers(min_value=2**31), not_a_number),
        "top_p": st.one_of(st.just(0), negative, st.floats(min_value=1.001), odd, not_a_number),
        "min_p": st.one_of(negative, st.floats(min_value=1.001), odd, not_a_number),
        "typical_p": st.one_of(st.just(0), negative, st.floats(min_value=1.001), odd),
        "repeat_penalty": st.one_of(st.just(0), negative, too_large, odd),
        "frequency_penalty": st.one_of(st.floats(min_value=101), st.floats(max_value=-101), odd),
        "presence_penalty": st.one_of(st.floats(min_value=101), st.floats(max_value=-101), odd),
        "penalty_last_n": st.one_of(st.integers(max_value=-2), st.integers(min_value=2**31), not_a_number),
        "seed": st.one_of(st.integers(max_value=-1), st.integers(min_value=2**63), not_a_number),
        "logit_bias": st.one_of(
            st.dictionaries(st.integers(max_value=-1), st.floats(-1, 1), min_size=1),
            st.dictionaries(st.integers(0, 9), st.just(float("nan")), min_size=1),
            st.dictionaries(st.text(alphabet="xyz", min_size=1), st.just(1.0), min_size=1),
            st.integers(),
        ),
        "grammar": st.one_of(st.integers(), st.binary(min_size=1).map(lambda raw: b"\xff" + raw)),
        "grammar_root": st.one_of(st.just(""), st.just("-x"), st.text(min_size=65), st.just("a b")),
        "json_schema": st.one_of(st.integers(), st.text(), st.lists(st.integers())),
        "stop": st.one_of(
            st.lists(st.just(""), min_size=1), st.lists(st.just("x"), min_size=17), st.just(["y" * 257]), st.integers()
        ),
        "ignore_eos": st.one_of(st.text(alphabet="xyz", min_size=2), st.lists(st.booleans()), st.integers(min_value=2)),
        "timeout_s": st.one_of(st.just(0), negative, st.floats(min_value=1.1e7), odd, not_a_number),
        "queue_timeout_s": st.one_of(st.just(0), negative, st.floats(min_value=1.1e7), odd, not_a_number),
        "priority": st.one_of(st.integers(), st.text().filter(lambda text: text not in set(Priority))),
        "stream": st.one_of(st.integers(min_value=2), st.text(alphabet="xyz", min_size=2)),
        "idempotency_key": st.one_of(st.just(""), st.text(min_size=257, max_size=300), st.integers()),
        "metadata": st.one_of(st.integers(), st.text(), st.dictionaries(st.integers(), st.none(), min_size=1)),
        "no_such_parameter": st.integers(),
    }
    return st.one_of(*(st.tuples(st.just(name), value) for name, value in values.items()))


BAD_PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": "a", "tokens": [1]}),
    ("prompt", {"prompt": b"\xff\xfe"}),
    ("prompt", {"prompt": 7}),
    ("tokens", {"tokens": []}),
    ("tokens", {"tokens": [-1]}),
    ("tokens", {"tokens": [2**31]}),
    ("tokens", {"tokens": ["x"]}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "Robert'); DROP", "content": ""}]}),
    ("messages", {"messages": [{"role": "user", "content": 1, "more": 2}]}),
    ("messages", {"messages": "hello"}),
    ("messages", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ("valid Unicode", {"prompt": "half of a pair: \ud800"}),
    ("max_request_bytes", {"prompt": "x" * (5 * 1024 * 1024)}),
    ("grammar", {"prompt": "a", "grammar": "x", "json_schema": {}}),
    ("ignore_eos", {"prompt": "a", "grammar": "x", "ignore_eos": True}),
    ("grammar", {"prompt": "a", "grammar": "x" * 70_000}),
]


@pytest.mark.parametrize(("named", "arguments"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_a_bad_prompt_is_refused_at_once(sturdy_client: Client, named: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=named):
        sturdy_client.submit(**arguments)


def test_a_bad_parameter_is_refused_at_once_by_its_name(sturdy_client: Client, redis: Redis) -> None:
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

    n_keys = redis.dbsize()
    refuse()
    assert refused.total() >= N_BAD_PARAMETERS
    assert min(refused.values()) > N_BAD_PARAMETERS / 240
    assert redis.dbsize() <= n_keys, "something was submitted"


# ---- written past the client


def plant(redis: Any, served: ServedQueue, request: bytes | None, **fields: Any) -> str:
    """Put a job into the queue as `submit.lua` does, with any bytes as its request; returns its id."""
    job_id = str(JobId.new(served.queue))
    keys = KEYS.of_job(job_id)
    seconds, microseconds = 1_700_000_000, 0
    redis.xadd(keys.interactive, {"id": job_id}, id=f"{next(_entries)}-0")
    values: dict[str, Any] = {
        "request": request,
        "status": "queued",
        "priority": "interactive",
        "attempt": 0,
        "entry": "",
        "generated": 0,
        "ttl_ms": 600_000,
        "submitted_ms": seconds * 1000 + microseconds,
        "queue_deadline_ms": 0,
        "idempotency": "",
        **fields,
    }
    redis.hset(keys.job, mapping={name: value for name, value in values.items() if value is not None})
    return job_id
