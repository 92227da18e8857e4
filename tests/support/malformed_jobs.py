"""Malformed input of a queue: arguments that the client refuses, requests that the worker refuses, and stream entries
that name no job.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from typing import Any

import msgpack
from hypothesis import strategies as st

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import Priority

MAX_REQUEST_BYTES = 64 * 1024
"""The `max_request_bytes` of a worker that refuses the requests of `mutated_requests`."""


# ---- arguments of `submit`


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


# ---- encoded requests

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


# ---- stream entries


def garbage(rng: random.Random, queue: str) -> dict[Any, Any]:
    """Return the fields of a stream entry that names no job in partition 0 of a queue."""
    token = secrets.token_hex(16)
    ids = [
        f"{queue}.0.{token}",  # an id in the right format, but of no job
        f"another.0.{token}",
        f"{queue}.1.{token}",
        f"{queue}.0.{token[:-1]}",
        f"{queue}.0.{token}\n",
        f"{queue}.99999.{token}",
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
