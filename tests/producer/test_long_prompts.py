"""A long prompt of token ids does not stop the event loop of the client."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import SLICE_TOKENS, JobRequest
from llamaq.producer import AsyncClient
from llamaq.producer.submission import LONG_PROMPT_TOKENS
from llamaq.producer.testing import FakeWorker


@pytest.mark.parametrize(("n_tokens", "is_in_thread"), [(LONG_PROMPT_TOKENS, False), (3 * LONG_PROMPT_TOKENS, True)])
async def test_long_prompts_are_checked_and_encoded_in_a_thread(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, n_tokens: int, is_in_thread: bool
) -> None:
    threads: list[threading.Thread] = []

    def recorded(name: str) -> Any:
        work = getattr(codec, name)

        def run(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*args)

        return run

    for name in ("build_request", "encode_request"):
        monkeypatch.setattr(codec, name, recorded(name))
    prompt = [number % 1000 for number in range(n_tokens)]
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await client.submit(tokens=prompt)
        assert [thread is not threading.main_thread() for thread in threads] == [is_in_thread] * 2
        assert (await worker.start_next()).request.tokens == tuple(prompt)
        with pytest.raises(InvalidRequest, match=rf"tokens\.{n_tokens}: .*greater than or equal to 0"):
            await client.submit(tokens=[*prompt, -1])


@pytest.mark.parametrize("n_tokens", [1, 15, 16, SLICE_TOKENS, SLICE_TOKENS + 3, 2 * SLICE_TOKENS, 70_000])
def test_a_prompt_is_the_same_after_encoding_and_decoding(n_tokens: int) -> None:
    request = JobRequest(tokens=tuple(range(n_tokens)), max_tokens=3)
    assert codec.decode_request(codec.encode_request(request, 10**7), 10**7) == request


def test_the_values_of_a_long_prompt_are_converted_like_those_of_a_short_one() -> None:
    values: Any = [True, 2.0, "3"] + [4] * SLICE_TOKENS
    request = JobRequest(tokens=values)
    assert request.tokens is not None
    assert request.tokens[:4] == (1, 2, 3, 4)
    assert {type(token) for token in request.tokens} == {int}
