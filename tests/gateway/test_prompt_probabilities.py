"""Answers with the probabilities of long prompts neither stop the other streams of the server nor fill its memory."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.support.event_loop_gaps import check_gaps

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs, ScoredToken, row_format
from llamaq.gateway.completions.choice_stream import ChoiceStream
from llamaq.gateway.completions.prompt_probabilities import (
    MAX_VALUES_OF_ANSWER,
    PromptFields,
    PromptProbabilities,
    PromptValueCount,
    _by_id,
    all_tokens,
    write_off_the_loop,
)
from llamaq.gateway.completions.stream_chunks import StreamChunks
from llamaq.gateway.http.json_body import json_response
from llamaq.gateway.progress_fields import NO_PROGRESS
from llamaq.producer import Chunk
from llamaq.producer.openai_format.endpoints import Endpoint

N_TOP = 20
ROW = row_format(N_TOP).pack(-1.5, 3, *range(N_TOP), *(-0.5 - number for number in range(N_TOP)))


def scores(n_tokens: int) -> PromptLogprobs:
    return PromptLogprobs((7,) * n_tokens, N_TOP, ROW * (n_tokens - 1))


def result_of(prompt: PromptLogprobs | None) -> Result:
    return Result(
        job_id="q.0.1", text="", tokens=(), finish_reason=FinishReason.LENGTH, stats=JobStats(), seed=1,
        prompt_logprobs=prompt,
    )  # fmt: skip


class Pieces:
    async def token_bytes(self, _: object, tokens: set[int]) -> dict[int, bytes]:
        return {token: b"token %d" % token for token in tokens}


WRITER: Any = PromptProbabilities(Pieces(), None)  # type: ignore[arg-type]


async def write(prompt: PromptLogprobs) -> bytes:
    """Return a whole answer, as the route of completions writes it."""
    answer = {"choices": [{"prompt_logprobs": await WRITER.listed(prompt)}]}
    return bytes((await write_off_the_loop([prompt], lambda: json_response(answer))).body)


async def stream(prompt: PromptLogprobs) -> bytes:
    """Return the first chunks of a streamed choice."""

    async def describe(found: PromptLogprobs, _: str) -> PromptFields:
        return PromptFields(None, {"prompt_logprobs": await WRITER.listed(found)})

    unused: Any = None
    chunks = StreamChunks(Endpoint.COMPLETIONS, "id", "m", 0, "b")
    choice = ChoiceStream(chunks, 0, "q.0.1", "", None, unused, describe, NO_PROGRESS)
    return await choice.events_of(Chunk(index=0, offset=0, text="a", tokens=(1,), prompt_logprobs=prompt))


@pytest.mark.parametrize("answer", [write, stream])
async def test_other_streams_continue_while_probabilities_are_written(answer: Any) -> None:
    prompt = scores(6000)
    pieces = await Pieces().token_bytes(None, all_tokens(prompt))
    whole = await answer(prompt)

    def at_once() -> object:
        return json_response(_by_id(entry, pieces) for entry in prompt)

    assert whole.count(b"token 19") == 5999
    await check_gaps(at_once, lambda: answer(prompt))


async def test_a_whole_answer_has_an_entry_for_each_token() -> None:
    (choice,) = json.loads(await write(scores(3)))["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == third
    assert list(second) == ["7", *(str(token) for token in range(N_TOP) if token != 7)]
    assert second["7"] == {"logprob": -1.5, "rank": 3, "decoded_token": "token 7"}


def test_the_probabilities_of_one_answer_are_bounded() -> None:
    count, half = PromptValueCount(), scores(MAX_VALUES_OF_ANSWER // (1 + N_TOP) // 2)
    for prompt in (half, None, half):
        count.add(result_of(prompt))
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: .* stream"):
        count.add(result_of(half))


async def test_one_thread_writes_all_answers() -> None:
    writing = [write_off_the_loop([scores(6000)], threading.get_ident) for _ in range(8)]
    (thread,) = set(await asyncio.gather(*writing))
    assert thread != threading.get_ident()
    assert await write_off_the_loop([scores(2), None], threading.get_ident) == threading.get_ident()


def test_all_tokens_of_a_prompt_are_those_with_their_alternatives_and_the_end() -> None:
    rows = row_format(1).pack(-0.5, 1, 9, -0.5) + row_format(1).pack(-2.25, 3, 8, -0.125)
    prompt = PromptLogprobs((5, 9, 7), 1, rows)
    assert all_tokens(prompt) == {5, 9, 7, 8}
    assert all_tokens(replace(prompt, end=ScoredToken(1, -1.0, ((2, -0.5),)))) == {5, 9, 7, 8, 1, 2}
    assert all_tokens(PromptLogprobs((5, 6), 0, row_format(0).pack(-1.0, 4))) == {5, 6}
