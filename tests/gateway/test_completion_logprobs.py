"""The object `logprobs` of each choice of an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, TokenLogprobs
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.producer import Result
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import read_body


class Pieces:
    """The texts of tokens."""

    async def of(self, _: object, tokens: list[int]) -> dict[int, bytes]:
        return dict.fromkeys(tokens, b"x")


async def test_a_choice_without_probabilities_leaves_those_of_the_others_in_place() -> None:
    body = read_body(Endpoint.COMPLETIONS, {"prompt": "hi", "model": "m", "n": 3, "logprobs": 0})
    pieces: Any = Pieces()
    models, client = ModelKnowledge(pieces, pieces, pieces), SimpleNamespace(queue="q")
    asked = PreparedCompletion(models, cast("Any", client), body, CONTENT_ALONE, (), body.jobs)
    answer = await asked.answer(
        [
            result_of(()),
            result_of((1,), (TokenLogprobs(-0.5, ()),)),
            result_of((2,), (TokenLogprobs(-0.25, ()),)),
        ]
    )
    assert [each["logprobs"] and each["logprobs"]["token_logprobs"] for each in answer["choices"]] == [
        None, [-0.5], [-0.25],
    ]  # fmt: skip


def result_of(tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None = None) -> Result:
    """Return the result of a job, which ended before its first token if it has no probabilities."""
    reason = FinishReason.DEADLINE if logprobs is None else FinishReason.STOP
    return Result(
        job_id="q.0.1", text="", tokens=tokens, logprobs=logprobs, finish_reason=reason, stats=JobStats(), seed=1
    )
