"""The options that say which tokens a job may generate and which of them end it, through a real worker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_clients import openai_client

from llamaq.common.protocol.job_outcome import FinishReason, Result
from llamaq.producer import Client, InvalidRequest, JobFailed
from llamaq.producer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

STORY = "Once upon a time"
HELLO: Any = [{"role": "user", "content": "Hello! How are you?"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def story(client: Client) -> Result:
    return client.generate(STORY, **GREEDY, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(client: Client) -> Tokenizer:
    return client.tokenizer()


def text_before(tokenizer: Tokenizer, result: Result, n_tokens: int) -> str:
    """Return the text of the first tokens of a result."""
    return tokenizer.decode(result.tokens[:n_tokens])


# ---- min_tokens


def test_a_chat_does_not_end_before_its_minimum_of_tokens(client: Client) -> None:
    free = client.chat(HELLO, temperature=0, max_tokens=200)
    assert (free.finish_reason, len(free.tokens) < 100) == (FinishReason.STOP, True)
    samplings: list[Any] = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0, "repeat_penalty": 1.1}]
    for sampling in samplings:
        longer = client.chat(HELLO, **sampling, max_tokens=200, min_tokens=len(free.tokens) + 30)
        assert len(longer.tokens) >= len(free.tokens) + 30
    same = client.chat(HELLO, temperature=0, max_tokens=200, min_tokens=len(free.tokens))
    assert same.text == free.text


def test_a_stop_string_before_the_minimum_of_tokens_does_not_end_the_job(client: Client, story: Result) -> None:
    early, late = story.text[8:14], story.text[-20:-12]
    result = client.generate(STORY, **GREEDY, stop=[early, late], min_tokens=20)
    assert result.text == story.text[: story.text.index(late)]
    assert result.stats.stop_string == late


def test_a_grammar_that_is_complete_ends_the_job_before_its_minimum(client: Client) -> None:
    result = client.generate(STORY, temperature=0, choice=["yes", "no"], min_tokens=20)
    assert (result.text in {"yes", "no"}, result.finish_reason) == (True, FinishReason.STOP)
    longer = client.generate(STORY, temperature=0, grammar="root ::= [a-c]+", min_tokens=20, max_tokens=40)
    assert len(longer.tokens) >= 20


# ---- stop_token_ids and include_stop


def test_a_stop_token_ends_the_job_and_is_not_in_its_output(
    client: Client, story: Result, tokenizer: Tokenizer
) -> None:
    stop = story.tokens[25]
    n_tokens = story.tokens.index(stop)
    for is_streamed in (False, True):
        job = client.submit(STORY, **GREEDY, stop_token_ids=[stop], stream=is_streamed)
        shown = "".join(chunk.text for chunk in job.stream())
        result = job.result()
        assert result.text == shown == text_before(tokenizer, story, n_tokens)
        assert result.tokens == story.tokens[:n_tokens]
        assert (result.finish_reason, result.stats.stop_token) == (FinishReason.STOP, stop)
        assert result.stats.stop_string is None


def test_a_stop_token_is_not_generated_before_the_minimum_of_tokens(client: Client, story: Result) -> None:
    stop = story.tokens[5]
    result = client.generate(STORY, **GREEDY, stop_token_ids=[stop], min_tokens=30)
    assert len(result.tokens) >= 30
    assert stop not in result.tokens


def test_a_named_end_token_ends_a_job_that_ignores_the_others(client: Client) -> None:
    free = client.chat(HELLO, temperature=0, max_tokens=200)
    ends = [token for token in range(20) if token not in free.tokens]
    result = client.chat(HELLO, temperature=0, max_tokens=200, ignore_eos=True, stop_token_ids=ends)
    assert result.text == free.text
    assert result.stats.stop_token in ends


def test_the_output_ends_with_a_stop_string_that_is_included(client: Client, story: Result) -> None:
    for begin in range(10, 60, 7):
        stop = story.text[begin : begin + 4]
        chunks = list(client.stream(STORY, **GREEDY, ignore_eos=True, stop=[stop], include_stop=True))
        shown = "".join(chunk.text for chunk in chunks)
        assert shown == story.text[: story.text.index(stop) + len(stop)]


# ---- allowed_token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 0, "repeat_penalty": 1.3},
        {"temperature": 1.5, "logprobs": 2},
        {"temperature": 1.0, "mirostat": 2},
    ],
    ids=repr,
)
def test_only_allowed_tokens_are_generated(client: Client, story: Result, options: Any) -> None:
    allowed = sorted(set(story.tokens[:12]))
    result = client.generate(STORY, **options, max_tokens=40, allowed_token_ids=allowed)
    assert len(result.tokens) == 40, "end tokens are masked"
    assert set(result.tokens) <= set(allowed)


def test_a_grammar_may_use_only_allowed_tokens(client: Client, tokenizer: Tokenizer) -> None:
    allowed = [tokenizer.encode(letter)[-1] for letter in "bcd"]
    grammar: Any = {"grammar": "root ::= [ab]{3,3}", "temperature": 0}
    result = client.generate(STORY, **grammar, allowed_token_ids=allowed)
    assert (result.text, result.finish_reason) == ("bbb", FinishReason.STOP)
    with pytest.raises(JobFailed, match="allowed_token_ids") as failed:
        client.generate(STORY, **grammar, allowed_token_ids=allowed[1:])
    assert failed.value.code == "grammar_exhausted"


# ---- bad_words


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}], ids=repr)
def test_bad_words_are_not_generated(client: Client, story: Result, tokenizer: Tokenizer, options: Any) -> None:
    words = sorted(set(re.findall(r"\w+", story.text)), key=lambda word: len(tokenizer.encode(" " + word)))
    bad = [*words[:2], *words[-2:]]  # of one token, and of several
    result = client.generate(STORY, **options, max_tokens=60, ignore_eos=True, bad_words=bad)
    assert len(result.tokens) == 60
    assert not set(bad) & set(re.findall(r"\w+", result.text))


# ---- errors


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_a_token_outside_the_vocabulary_fails_its_job_alone(client: Client, name: str) -> None:
    options: Any = {name: [10**6]}
    neighbour = client.submit(STORY, max_tokens=20, ignore_eos=True)
    with pytest.raises(JobFailed, match=name) as failed:
        client.submit(STORY, **options).result()
    assert failed.value.code == "invalid_token"
    assert neighbour.result().stats.generated_tokens == 20


def test_a_minimum_above_the_maximum_is_refused_on_submit(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: 9 .* max_tokens"):
        client.submit(STORY, max_tokens=8, min_tokens=9)


# ---- HTTP


@pytest.mark.parametrize("is_chat", [True, False])
async def test_answers_and_chunks_have_the_token_ids_on_request(
    demo: ServedQueue, client: Client, tokenizer: Tokenizer, is_chat: bool
) -> None:
    prompts: list[Any] = [HELLO] if is_chat else [STORY, "The", tokenizer.encode("A cat")]
    request: dict[str, Any] = {"messages": HELLO} if is_chat else {"prompt": "to be replaced"}
    request |= {"model": demo.queue, "temperature": 0, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    async with openai_client(demo) as api:
        create: Any = api.chat.completions.create if is_chat else api.completions.create
        for prompt in prompts:
            named = {} if is_chat else {"prompt": prompt}
            tokens = tokenizer.encode_chat(prompt) if is_chat else prompt
            if isinstance(tokens, str):
                tokens = tokenizer.encode(tokens)
            expected = client.generate_tokens(tokens, temperature=0, max_tokens=12)
            stop = expected.text[-4:-1]  # its beginning is withheld for some tokens
            answer = (await create(**request | named, n=2)).model_dump()
            assert [choice["token_ids"] for choice in answer["choices"]] == [list(expected.tokens)] * 2
            places = [answer] if is_chat else answer["choices"]
            assert [place["prompt_token_ids"] for place in places] == [list(tokens)] * len(places)
            chunks = [chunk.model_dump() async for chunk in await create(**request | named, stop=stop, stream=True)]
            assert (chunks[0] if is_chat else chunks[0]["choices"][0])["prompt_token_ids"] == list(tokens)
            later = chunks[1:] if is_chat else [chunk["choices"][0] for chunk in chunks[1:]]
            assert not any("prompt_token_ids" in place for place in later)
            streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
            assert streamed == list(client.generate_tokens(tokens, temperature=0, max_tokens=12, stop=stop).tokens)


async def test_an_answer_without_return_token_ids_has_none(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        answer = await api.chat.completions.create(model=demo.queue, messages=HELLO, max_tokens=2)
    assert "prompt_token_ids" not in answer.model_dump()
    assert "token_ids" not in answer.model_dump()["choices"][0]


async def test_the_openai_package_sends_the_options_of_vllm(demo: ServedQueue, client: Client) -> None:
    plain = client.chat(HELLO, temperature=0, max_tokens=30, ignore_eos=True)
    stop = plain.tokens[10]
    n_tokens = plain.tokens.index(stop)
    request: dict[str, Any] = {"model": demo.queue, "messages": HELLO, "temperature": 0, "max_tokens": 30}
    async with openai_client(demo) as api:
        by_token = await api.chat.completions.create(**request, extra_body={"stop_token_ids": [stop]})
        stream = await api.chat.completions.create(**request, extra_body={"stop_token_ids": [stop]}, stream=True)
        last = [chunk async for chunk in stream][-1]
        included = await api.chat.completions.create(
            **request, stop=plain.text[4:8], extra_body={"include_stop_str_in_output": True}
        )
        listed = await api.chat.completions.create(
            **request, extra_body={"allowed_token_ids": [plain.tokens[0]], "min_tokens": 30}
        )
    (choice,) = by_token.model_dump()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == client.tokenizer().decode(plain.tokens[:n_tokens])
    assert last.model_dump()["choices"][0]["stop_reason"] == stop
    (choice,) = included.model_dump()["choices"]
    assert choice["message"]["content"] == plain.text.partition(plain.text[4:8])[0] + plain.text[4:8]
    assert choice["stop_reason"] == plain.text[4:8]
    assert listed.usage is not None
    assert listed.usage.completion_tokens == 30
    assert "stop_reason" not in listed.model_dump()["choices"][0]
