"""`llamaq serve` in front of a real worker, with the openai package as the client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel
from tests.support.http_clients import openai_client
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Place(BaseModel):
    size: Literal["small", "large"]
    is_warm: bool


async def test_a_chat_has_the_text_of_the_python_client_streamed_or_not(demo: ServedQueue, client: Client) -> None:
    expected = client.chat(HELLO, max_tokens=12, temperature=0)
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(
            model=demo.queue, messages=HELLO, max_completion_tokens=12, temperature=0
        )
        stream = await api.chat.completions.create(
            model=demo.queue,
            messages=HELLO,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.model_dump()["timings"]["cache_n"] > 0
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def test_n_answers_share_their_prompt_and_differ_by_their_seeds(demo: ServedQueue, client: Client) -> None:
    options: Any = {"max_tokens": 8, "temperature": 1.5}
    expected = [client.chat(HELLO, seed=seed, **options).text for seed in (5, 6, 7)]
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(model=demo.queue, messages=HELLO, n=3, seed=5, **options)
        stream = await api.chat.completions.create(
            model=demo.queue, messages=HELLO, n=3, seed=5, stream=True, **options
        )
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == client.chat(HELLO, max_tokens=1).stats.prompt_tokens


async def test_completions_continue_texts_and_tokens_and_echo_them(demo: ServedQueue, client: Client) -> None:
    prompts = ["Once upon a time", "The little dog"]
    expected = [client.generate(prompt, max_tokens=8, temperature=0).text for prompt in prompts]
    async with openai_client(demo) as api:
        several = await api.completions.create(model=demo.queue, prompt=prompts, max_tokens=8, temperature=0, echo=True)
        tokens = client.tokenize(prompts[0])
        stream = await api.completions.create(model=demo.queue, prompt=tokens, max_tokens=8, temperature=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in several.choices] == [a + b for a, b in zip(prompts, expected, strict=True)]
    assert text == expected[0]
    assert several.object == "text_completion"


async def test_parse_returns_an_object_of_the_given_class(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        answer = await api.chat.completions.parse(
            model=demo.queue, messages=HELLO, response_format=Place, temperature=0, max_tokens=200
        )
        free = await api.chat.completions.create(
            model=demo.queue, messages=HELLO, response_format={"type": "json_object"}, max_tokens=100, stop=["}"]
        )
        other = await api.chat.completions.create(
            model=demo.queue,
            messages=HELLO,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 3},
        )
    assert isinstance(answer.choices[0].message.parsed, Place)
    assert (free.choices[0].message.content or "").startswith("{")
    assert other.choices[0].message.content in ("yes", "no")


async def test_the_options_of_a_request_reach_the_job(demo: ServedQueue, client: Client) -> None:
    parts: Any = [
        {"role": "developer", "content": "You are kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    same: Any = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hel\nlo"}]
    plain = client.chat(same, max_tokens=8, temperature=0)
    async with openai_client(demo) as api:
        biased = await api.chat.completions.create(
            model=demo.queue,
            messages=parts,
            max_tokens=8,
            temperature=0,
            logit_bias={str(plain.tokens[0]): -100},
            extra_body={"unknown_field": [1], "dry_multiplier": 0},
        )
        same_again = await api.chat.completions.create(
            model=demo.queue, messages=parts, max_tokens=8, temperature=0, extra_body={"cache_salt": "other"}
        )
        stopped = await api.chat.completions.create(
            model=demo.queue, messages=parts, max_tokens=8, temperature=0, stop=plain.text[4:6]
        )
    assert same_again.choices[0].message.content == plain.text
    assert biased.choices[0].message.content != plain.text
    assert stopped.choices[0].message.content == plain.text.partition(plain.text[4:6])[0]
    assert stopped.choices[0].finish_reason == "stop"


async def test_logprobs_have_the_texts_of_tokens_streamed_or_not(demo: ServedQueue) -> None:
    options: Any = {"model": demo.queue, "max_tokens": 6, "temperature": 0}
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **options)
        stream = await api.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=3, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        legacy = await api.completions.create(prompt="Once upon a time", logprobs=2, **options)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 6
    assert b"".join(bytes(each.bytes or []) for each in content).decode() == answer.choices[0].message.content
    for each in content:  # greedy: the drawn token is the most probable one
        assert len(each.top_logprobs) == 3
        assert (each.top_logprobs[0].token, each.top_logprobs[0].logprob) == (each.token, each.logprob)
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [each.token for part in streamed for each in part.content or []] == [each.token for each in content]
    assert legacy.choices[0].logprobs is not None
    assert "".join(legacy.choices[0].logprobs.tokens or []) == legacy.choices[0].text
    assert len(legacy.choices[0].logprobs.top_logprobs or []) == 6


async def test_the_answer_continues_a_last_message_of_the_assistant(demo: ServedQueue, client: Client) -> None:
    whole = client.chat(HELLO, max_tokens=12, temperature=0).text
    begun: Any = [*HELLO, {"role": "assistant", "content": whole[:5]}]
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(model=demo.queue, messages=begun, max_tokens=4, temperature=0)
    assert whole.startswith(whole[:5] + (answer.choices[0].message.content or "x"))


async def test_a_demanded_tool_is_called_streamed_or_not(demo: ServedQueue) -> None:
    units = {"type": "string", "enum": ["C", "F"]}
    parameters = {"type": "object", "properties": {"unit": units}, "required": ["unit"], "additionalProperties": False}
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    other: Any = {"type": "function", "function": {"name": "other"}}
    options: Any = {
        "model": demo.queue,
        "messages": HELLO,
        "tools": [other, weather],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "frequency_penalty": 2,  # without it, the demo model never ends its white space
        "max_tokens": 200,
    }
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(**options)
        stream = await api.chat.completions.create(**options, stream=True)
        chunks = [chunk async for chunk in stream]
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    deltas = [delta for chunk in chunks for each in chunk.choices for delta in each.delta.tool_calls or []]
    assert deltas[0].function is not None
    assert deltas[0].function.name == "weather"
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_errors_name_the_field_and_have_a_status(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        with pytest.raises(openai.NotFoundError, match="GET /v1/models") as missing:
            await api.chat.completions.create(model="no-such-model", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as unsupported:
            await api.chat.completions.create(model=demo.queue, messages=HELLO, extra_body={"documents": [{}]})
        with pytest.raises(openai.BadRequestError) as out_of_bounds:
            await api.chat.completions.create(model=demo.queue, messages=HELLO, temperature=-1)
        with pytest.raises(openai.BadRequestError) as too_long:
            await api.completions.create(model=demo.queue, prompt="word " * 3000, stream=True)
        with pytest.raises(openai.BadRequestError) as bad_grammar:
            await api.completions.create(model=demo.queue, prompt="x", extra_body={"grammar": "root ::= ("})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert unsupported.value.param == "documents"
    assert out_of_bounds.value.param == "temperature"
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.type == "exceed_context_size_error"
    assert bad_grammar.value.code == "invalid_grammar"


async def test_a_repeated_request_with_an_idempotency_key_gets_the_first_answer(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        answers = [
            await api.chat.completions.create(
                model=demo.queue, messages=HELLO, max_tokens=4, n=2, extra_headers={"Idempotency-Key": key}
            )
            for key in ("a", "a", "b")
        ]
    assert answers[0].id == answers[1].id != answers[2].id
    assert answers[0].choices == answers[1].choices


async def test_the_models_are_the_queues_with_their_context(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        models = {model.id: model.model_dump() async for model in api.models.list()}
        shown = await api.models.retrieve(demo.queue)
        (card,) = [worker.card for worker in demo.client().workers()]
        by_alias = await api.models.retrieve(card.model)
        by_model = await api.completions.create(model=card.model, prompt="x", max_tokens=1)
    assert models[demo.queue]["meta"]["n_ctx_train"] == card.n_ctx_train
    assert models[demo.queue]["max_model_len"] == card.context_limit
    assert models[demo.queue]["capabilities"] == ["completion", "chat"]
    assert shown.model_dump()["meta"] == models[demo.queue]["meta"]
    assert by_alias.id in models
    assert json.dumps(models[demo.queue]["aliases"]) == json.dumps([card.model])
    assert by_model.model == card.model
