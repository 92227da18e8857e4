"""The object `logprobs` of each choice of an answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from llamaq.common.protocol.job_outcome import FinishReason, JobStats, TokenLogprobs
from llamaq.gateway.completions.choice_stream import ChoiceStream
from llamaq.gateway.completions.logprobs import logprobs_object
from llamaq.gateway.completions.stream_chunks import StreamChunks
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.prepared.completion import PreparedCompletion
from llamaq.gateway.progress_fields import NO_PROGRESS
from llamaq.producer import Chunk, Result
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


E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}"
TOKENS = {1: b"a", 2: E_ACUTE.encode()[:1], 3: E_ACUTE.encode()[1:] + b"b", 4: b"X", 5: b"yz"}


async def test_each_token_of_a_stream_has_the_offset_of_its_text_although_text_is_withheld() -> None:
    """The text `a` is withheld while it may begin a stop string. The bytes of a letter arrive in two tokens."""

    class Texts:
        async def of(self, _: object, tokens: set[int]) -> dict[int, bytes]:
            return {token: TOKENS[token] for token in tokens}

    body = read_body(Endpoint.COMPLETIONS, {"prompt": "hi", "model": "m", "logprobs": 0, "echo": True})
    texts: Any = Texts()
    client: Any = SimpleNamespace(queue="q")
    asked = PreparedCompletion(ModelKnowledge(texts, texts, texts), client, body, CONTENT_ALONE, ("hi",), body.jobs)
    chunks = StreamChunks(Endpoint.COMPLETIONS, "id", "m", 0, "b")
    choice = ChoiceStream(chunks, 0, "q.0.1", "hi", None, asked.logprobs, asked.fields_of_prompt, NO_PROGRESS)
    pieces = [("", (1,)), ("a", (2,)), ("", (3,)), (E_ACUTE + "bXyz", (4, 5))]
    offsets: list[int] = []
    for number, (text, tokens) in enumerate(pieces):
        scores = tuple(TokenLogprobs(-0.5, ()) for _ in tokens)
        events = await choice.events_of(Chunk(text, tokens, number, 0, scores))
        found = [json.loads(line.removeprefix(b"data: ")) for line in events.splitlines() if line]
        offsets += [each for event in found for each in (event["choices"][0]["logprobs"] or {}).get("text_offset", [])]
    scores = (TokenLogprobs(-0.5, ()),) * len(TOKENS)
    answer = await asked.answer([result_of(tuple(TOKENS), scores)])
    assert offsets == [2, 3, 3, 5, 6]
    assert answer["choices"][0]["logprobs"]["text_offset"] == offsets


def test_the_best_of_the_alternatives_with_one_text_is_kept() -> None:
    scores = TokenLogprobs(-0.25, ((1, -0.25), (2, -1.5), (3, -2.0), (4, -3.0)))
    pieces = {1: b"a", 2: b"\xc3", 3: b"\xe2", 4: b"b"}  # the beginnings of two characters have no text of their own
    found = logprobs_object(Endpoint.COMPLETIONS, [1], [scores], pieces)
    assert found["top_logprobs"] == [{"a": -0.25, "\N{REPLACEMENT CHARACTER}": -1.5, "b": -3.0}]


def result_of(tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None = None) -> Result:
    """Return the result of a job, which ended before its first token if it has no probabilities."""
    reason = FinishReason.DEADLINE if logprobs is None else FinishReason.STOP
    return Result(
        job_id="q.0.1", text="", tokens=tokens, logprobs=logprobs, finish_reason=reason, stats=JobStats(), seed=1
    )
