"""10,000 malformed submissions: each ends in a clear error, and the worker serves its other jobs as before.

The client refuses 5,000 of them. 3,000 are valid stream entries of jobs whose hash has a mutated request. 2,000 are
stream entries that name no job. The tests run valid jobs in between.
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
MAX_REQUEST_BYTES = 64 * 1024


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


def out_of_bounds() -> st.SearchStrategy[tuple[str, Any]]:
    """The name of a parameter, and an invalid value for it."""
    not_a_number = st.one_of(st.text(alphabet="abc-", min_size=1), st.lists(st.integers(), max_size=2), st.binary())
    too_large = st.floats(min_value=1e10, allow_infinity=True)
    negative = st.floats(max_value=-1e-6, allow_nan=False)
    odd = st.sampled_from([float("nan"), float("inf"), float("-inf")])
    values: dict[str, st.SearchStrategy[Any]] = {
        "max_tokens": st.one_of(st.integers(max_value=-2), st.integers(min_value=1_000_001), odd, not_a_number),
        "prompt_logprobs": st.one_of(st.integers(max_value=-1), st.integers(min_value=21), odd, not_a_number),
        "temperature": st.one_of(negative, too_large, odd, not_a_number),
        "top_k": st.one_of(st.integers(max_value=-1), st.integers(min_value=2**31), not_a_number),
        "top_p": st.one_of(st.just(0), negative, st.floats(min_value=1.001), odd, not_a_number),
        "min_p": st.one_of(negative, st.floats(min_value=1.001), odd, not_a_number),
        "typical_p": st.one_of(st.just(0), negative, st.floats(min_value=1.001), odd),
        "repeat_penalty": st.one_of(st.just(0), negative, too_large, odd),
        "frequency_penalty": st.one_of(st.floats(min_value=101), st.floats(max_value=-101), odd),
        "presence_penalty": st.one_of(st.floats(min_value=101), st.floats(max_value=-101), odd),
        "penalty_last_n": st.one_of(st.integers(max_value=-2), st.integers(min_value=2**31), not_a_number),
        "seed": st.one_of(st.integers(max_value=-2), st.integers(min_value=2**63), not_a_number),
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
            st.lists(st.just(""), min_size=1),
            st.integers(129, 140).map(lambda n: ["x"] * n),
            st.just(["y" * 241] * 17),
            st.just(["y" * 257]),
            st.integers(),
        ),
        "ignore_eos": st.one_of(st.text(alphabet="xyz", min_size=2), st.lists(st.booleans()), st.integers(min_value=2)),
        "timeout_s": st.one_of(st.just(0), negative, st.floats(min_value=1.1e7), odd, not_a_number),
        "generation_timeout_s": st.one_of(st.just(0), negative, st.floats(min_value=1.1e7), odd, not_a_number),
        "n_indent": st.one_of(st.integers(max_value=-1), st.integers(min_value=1001), st.booleans()),
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
    ("grammar", {"prompt": "a", "grammar": "x" * 70_000}),
]


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


REQUEST = {"prompt": "the", "max_tokens": 2, "seed": 1}
FULL_REQUEST: dict[str, Any] = {
    "prompt": "the",
    "max_tokens": 2,
    "seed": 1,
    "temperature": 0.5,
    "top_k": 40,
    "stop": ["x"],
    "logit_bias": {5: 1.0},
    "metadata": {"a": [1, None]},
}


def wrong_values(rng: random.Random) -> bytes:
    """Return an encoded request in which one parameter has a value of a wrong type or size."""
    name = rng.choice([*FULL_REQUEST, "messages", "tokens", "grammar", "json_schema", "timeout_s", "priority"])
    value = rng.choice([-7, 2**63, float("nan"), "🎉" * 9, b"\xff\x00", [[[[]]]], [-1], {"": {}}, {1: 2}])
    return bytes(msgpack.packb({**REQUEST, name: value}))


def wrong_shapes(rng: random.Random) -> bytes:
    """Return bytes that are not msgpack, or msgpack that is no map, has wrong lengths or is nested deeply."""
    huge = rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]) + b"\xff\xff\xff\xff"
    nested = rng.choice([b"\x91", b"\x81\xa1a", b"\x81\x91"]) * rng.choice([100, 5_000, 20_000])
    value = rng.choice([None, 7, "text", [], [1, 2], True, {}, {1: 2}, {"": ""}, {b"prompt": b"the"}, {"seed": 1}])
    others = [b"", b"\xc1", b'{"prompt": "the", "seed": 1}', b"cos\nsystem\n(S'true'\ntR.", rng.randbytes(40)]
    return rng.choice([huge, huge + rng.randbytes(9), nested, bytes(msgpack.packb(value)), *others])


def damaged(rng: random.Random) -> bytes:
    """Return an encoded valid request with some bytes changed, removed, repeated or added."""
    data = bytearray(msgpack.packb(rng.choice([REQUEST, FULL_REQUEST])))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place:] = b"" if place else b"\x80"
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 5))
            case _:
                data += data[place:]
    return bytes(data)


def too_large(rng: random.Random) -> bytes:
    return bytes(msgpack.packb({**REQUEST, "prompt": "x" * (MAX_REQUEST_BYTES + rng.randrange(9))}))


def mutated_requests(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield `count` invalid encoded requests. Mutations that happen to be valid are skipped."""
    kinds = [wrong_values] * 10 + [damaged] * 20 + [wrong_shapes] * 10 + [too_large]
    while count:
        data = rng.choice(kinds)(rng)
        try:
            if codec.decode_request(data, MAX_REQUEST_BYTES).seed is not None:
                continue
        except InvalidRequest:
            pass
        yield data
        count -= 1


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
    job_ids = [plant(redis, sturdy, request=msgpack.packb(REQUEST), **fields) for _ in range(3)]
    good = sturdy_client.submit("the world", max_tokens=8)
    assert good.result(timeout=20).finish_reason is FinishReason.LENGTH
    wait_for(lambda: sturdy_client.queue_depth().running == 0)
    assert len(set(job_ids)) == 3


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


def garbage(rng: random.Random, served: ServedQueue) -> dict[Any, Any]:
    """Return the fields of a stream entry that names no job of this queue."""
    token = secrets.token_hex(16)
    ids = [
        f"{served.queue}.0.{token}",  # an id in the right format, but of no job
        f"another.0.{token}",
        f"{served.queue}.1.{token}",
        f"{served.queue}.0.{token[:-1]}",
        f"{served.queue}.0.{token}\n",
        f"{served.queue}.99999.{token}",
        "../../etc/passwd",
        "",
        "{}:" * 50,
    ]
    return rng.choice(
        [
            {"id": rng.choice(ids)},
            {"id": rng.randbytes(rng.randint(1, 60))},
            {rng.randbytes(8): rng.randbytes(8)},
            {"Id": ids[0]},
            {"id": "x" * rng.choice([1_000, 100_000])},
            {f"field-{index}": "x" for index in range(rng.choice([1, 10, 500]))},
            {"id": ids[0], "request": rng.randbytes(200)},
        ]
    )


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
                pipe.xadd(rng.choice(streams(sturdy)), garbage(rng, sturdy))
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
    assert all(repr(value)[2:-1].encode() in letter[b"held"] for value in entry.values() if isinstance(value, str))


def test_a_second_entry_of_the_same_job_is_dropped(sturdy: ServedQueue, sturdy_client: Client, redis: Redis) -> None:
    job = sturdy_client.submit("the world", max_tokens=100)
    for stream in streams(sturdy):
        redis.xadd(stream, {"id": job.id})
    assert job.result().stats.generated_tokens == 100
    assert job.status().attempt == 1
    assert job.status().state is JobState.FINISHED
