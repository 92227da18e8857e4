"""The number of tokens of reasoning, as answers show it in their usage."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.errors import NoWorker
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.producer.answer_parts.answer_format import AnswerForm, form_of

QWEN = "{{ messages }}</think>"


class Pieces:
    """The bytes of a few tokens. The id of a token is its number in the answer."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.n_questions = 0

    async def client(self, queue: str, *, waits: bool) -> str:
        assert waits, "the bytes that are known are used without a worker too"
        return queue

    async def of(self, client: str, tokens: set[int]) -> dict[int, bytes]:
        self.n_questions += 1
        if client == "dead":
            raise NoWorker(client)
        if client == "outage":
            raise RedisConnectionError
        return {token: self._pieces[token] for token in tokens}


async def count(pieces: list[bytes], form: AnswerForm, queue: str = "q", offsets: tuple[int, ...] = ()) -> int:
    """Return the number of tokens of reasoning in an answer of these tokens."""
    return await models_of(Pieces(pieces)).count_reasoning(form, answer(pieces, queue, offsets))


def models_of(known: Any) -> ModelKnowledge:
    return ModelKnowledge(known, known, None)  # type: ignore[arg-type]


def answer(pieces: list[bytes], queue: str = "q", offsets: tuple[int, ...] = ()) -> Result:
    return Result(
        job_id=f"{queue}.0.{'0' * 32}",
        text=b"".join(pieces).decode(errors="replace"),
        tokens=tuple(range(len(pieces))),
        tag_offsets=offsets,
        finish_reason=FinishReason.STOP,
        stats=JobStats(),
        seed=1,
    )


FORM = form_of(QWEN)
STARTED = FORM.after("<think>\n")
E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()


@pytest.mark.parametrize(
    ("pieces", "form", "expected"),
    [
        ([b"<think>", b"a", b" b", b"</think>", b"c"], FORM, 2),
        ([b"<th", b"ink>", b"a", b" b", b"</", b"think", b">c", b"d"], FORM, 2),
        ([b"<think>a", b"b", b"c</think>", b"d"], FORM, 2),  # the text of the first begins before the reasoning
        ([b"a", b"b", b"c</thi", b"nk>", b"d"], STARTED, 3),
        ([b"a", E_ACUTE[:1], E_ACUTE[1:], b"</think>", b"d"], STARTED, 3),
        ([b"a", E_ACUTE[:1], b"</think>", b"d"], STARTED, 2),
        ([b"a", b"b"], STARTED, 2),
        ([b" ", b"b", b"</think>", b"\n"], STARTED, 2),
        ([b"a", b"b"], FORM, 0),
        ([b"<think>", b"a", b"</think>"], form_of(QWEN, may_reason=False), 0),
    ],
)
async def test_tokens_that_begin_in_the_reasoning_are_counted(
    pieces: list[bytes], form: AnswerForm, expected: int
) -> None:
    assert await count(pieces, form) == expected


async def test_a_quoted_tag_belongs_to_the_reasoning() -> None:
    form = form_of(QWEN, tag_tokens={"<think>": 0, "</think>": 5})
    pieces = [b"<think>", b"no ", b"</", b"think>", b" yet", b"</think>", b"Yes"]
    assert await count(pieces, form, offsets=(0, 22)) == 4


@pytest.mark.parametrize("queue", ["dead", "outage"])
async def test_without_a_worker_the_number_is_estimated(queue: str) -> None:
    assert await count([b"ab", b"cd", b"</think>", b"efgh"], STARTED, queue) == 1


async def test_one_question_counts_the_reasoning_of_all_choices() -> None:
    pieces = [b"a", b"b", b"</think>", b"d"]
    known = Pieces(pieces)
    answers = [answer(pieces), answer(pieces[:1]), answer(pieces)]
    assert await models_of(known).count_reasoning(STARTED, *answers) == 5
    assert known.n_questions == 1
