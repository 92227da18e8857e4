"""The probabilities of prompts over HTTP: echoed, as lm-eval asks for them, and in vLLM's field `prompt_logprobs`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_clients import http_client, openai_client
from tests.support.prompt_oracle import PromptOracle

from llamaq.gateway.completions import prompt_probabilities
from llamaq.producer import Client

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOLERANCE = 5e-3
LM_EVAL: Any = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
"""The options of a request of lm-eval's `local-completions` for the likelihood of a continuation."""
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def oracle(demo_model: Path) -> PromptOracle:
    return PromptOracle(demo_model)


def likelihood(choice: dict[str, Any], n_context: int) -> tuple[float, bool]:
    """Return the log-likelihood of the continuation in an answer, and whether it is greedy, as lm-eval reads them."""
    found = choice["logprobs"]
    own, top = found["token_logprobs"][n_context:-1], found["top_logprobs"][n_context:-1]
    return sum(own), all(value == max(others.values()) for value, others in zip(own, top, strict=True))


def expected_likelihood(
    oracle: PromptOracle, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    tokens = [*context, *continuation]
    rows = oracle.logprobs(tokens)[len(context) - 1 : -1]
    values = [row[token] for row, token in zip(rows, continuation, strict=True)]
    return sum(values), all(row.argmax() == token for row, token in zip(rows, continuation, strict=True))


async def test_lm_eval_gets_the_likelihoods_of_continuations(
    demo: ServedQueue, client: Client, oracle: PromptOracle
) -> None:
    """The last pair is a whole answer of the model, after which it draws an end token."""
    tokenizer = client.tokenizer()
    chat = tokenizer.encode_chat(HELLO)
    answer = client.chat(HELLO, max_tokens=100, temperature=0)
    assert answer.finish_reason == "stop"
    pairs = [
        (tokenizer.encode("Once upon a time"), tokenizer.encode(text)[1:]) for text in (" there was", " xylophone")
    ]
    pairs.append((chat, list(answer.tokens)))
    async with http_client(demo) as http:
        prompts = [[*context, *continuation] for context, continuation in pairs]
        reply = await http.post(COMPLETIONS, json={**LM_EVAL, "prompt": prompts})
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        found = [likelihood(choice, len(context)) for choice, (context, _) in zip(choices, pairs, strict=True)]
    expected = [expected_likelihood(oracle, *pair) for pair in pairs]
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=0.1)
    assert [one for _, one in found] == [one for _, one in expected]
    assert found[-1][1]
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert [len(logprobs[name]) for name in logprobs] == [len(prompt) + 1] * 4
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None


async def test_the_offsets_of_an_echoed_prompt_are_those_of_its_text(demo: ServedQueue) -> None:
    text = "Once upon a time, 世界 was é😀!"
    async with http_client(demo) as http:
        body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        reply = await http.post(COMPLETIONS, json=body)
    choice = reply.json()["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(text)
    assert offsets == sorted(offsets)
    whole = [(token, at) for token, at in zip(tokens[1:], offsets[1:], strict=True) if "\ufffd" not in token]
    assert all(choice["text"].startswith(token, at) for token, at in whole)
    assert {"�" in token for token in tokens} == {True, False}
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [2] * (len(tokens) - 1)


async def test_without_tokens_to_generate_only_the_prompt_is_returned(demo: ServedQueue, client: Client) -> None:
    async with http_client(demo) as http:
        body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = (await http.post(COMPLETIONS, json=body)).json()
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in (await http.post(COMPLETIONS, json={**body, "stream": True})).text.splitlines()
            if line.startswith("data: {")
        ]
        again = (await http.post(COMPLETIONS, json={**body, "max_tokens": 1})).json()
    choice, longer = answer["choices"][0], again["choices"][0]
    assert choice["text"] == "Once upon a time"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert {name: values[:-1] for name, values in longer["logprobs"].items()} == choice["logprobs"]
    assert "".join(each["choices"][0]["text"] for each in chunks) == "Once upon a time"
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]


async def test_a_stream_has_the_probabilities_of_the_answer(demo: ServedQueue) -> None:
    body = {"prompt": "Once upon a time", "echo": True, "logprobs": 2, "max_tokens": 6, "temperature": 0}
    async with http_client(demo) as http:
        whole = (await http.post(COMPLETIONS, json={**body, "prompt_logprobs": 2})).json()["choices"][0]
        reply = await http.post(COMPLETIONS, json={**body, "prompt_logprobs": 2, "stream": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(each["text"] for each in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        streamed = [value for each in choices if each["logprobs"] for value in each["logprobs"][name]]
        assert len(streamed) == len(values)
        assert streamed == values or name in ("token_logprobs", "top_logprobs")
    assert [each["prompt_logprobs"] is not None for each in choices if "prompt_logprobs" in each] == [True]


async def test_prompt_logprobs_have_the_form_of_vllm(demo: ServedQueue, client: Client) -> None:
    expected = client.chat(HELLO, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    assert expected is not None
    async with http_client(demo) as http:
        chat = (await http.post(CHAT, json={"messages": HELLO, "max_tokens": 4, "prompt_logprobs": 1})).json()
        text = (await http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 1, "prompt_logprobs": 0})).json()
        stream = await http.post(
            CHAT, json={"messages": HELLO, "max_tokens": 4, "prompt_logprobs": 1, "stream": True, "temperature": 0}
        )
        plain = (await http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 1})).json()
    found = chat["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(expected)
    for entry, wanted in zip(found[1:], expected[1:], strict=True):
        assert wanted is not None
        assert {int(token) for token in entry} == {wanted.token, *(token for token, _ in wanted.top)}
        own = entry[str(wanted.token)]
        assert own["rank"] == wanted.rank
        assert own["logprob"] == pytest.approx(wanted.logprob, abs=TOLERANCE)
        assert {value["rank"] for value in entry.values()} == {1, wanted.rank}
    texts = [client.tokenizer().decode([token]) for token in expected.tokens]
    assert [entry[str(token)]["decoded_token"] for entry, token in zip(found[1:], expected.tokens[1:], strict=True)][
        -4:
    ]
    assert texts
    assert [len(entry) for entry in text["choices"][0]["prompt_logprobs"][1:]] == [1]
    assert "prompt_logprobs" not in plain["choices"][0]
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
    listed = [chunk["prompt_logprobs"] for chunk in map(json.loads, lines) if "prompt_logprobs" in chunk]
    assert [len(each) for each in listed] == [len(expected)]


async def test_what_has_no_place_for_prompt_logprobs_refuses_them(demo: ServedQueue) -> None:
    async with http_client(demo) as http:
        bodies: dict[str, Any] = {
            "/v1/responses": {"input": "hi"},
            "/v1/messages": {"messages": HELLO, "max_tokens": 3},
            "/completion": {"prompt": "hi", "n_predict": 1},
        }
        replies = [await http.post(path, json={**body, "prompt_logprobs": 1}) for path, body in bodies.items()]
        too_many = await http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 1, "prompt_logprobs": 21})
    assert [reply.status_code for reply in (*replies, too_many)] == [400] * 4
    assert all("prompt_logprobs" in reply.json()["error"]["message"] for reply in (*replies, too_many))


async def test_several_answers_with_too_many_probabilities_are_refused_unless_they_are_a_stream(
    demo: ServedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_probabilities, "MAX_VALUES_OF_ANSWER", 20)
    body = {"prompt": "Once upon a time", "max_tokens": 1, "prompt_logprobs": 2}
    async with http_client(demo) as http:
        one = await http.post(COMPLETIONS, json=body)
        two = await http.post(COMPLETIONS, json={**body, "n": 2})
        streamed = await http.post(COMPLETIONS, json={**body, "n": 2, "stream": True})
    assert (one.status_code, two.status_code, streamed.status_code) == (200, 400, 200)
    assert "prompt_logprobs" in two.json()["error"]["message"]
    assert streamed.text.count('"prompt_logprobs"') == 2


async def test_lines_of_batches_have_the_probabilities(demo: ServedQueue) -> None:
    body = {"model": demo.queue, "messages": HELLO, "max_tokens": 2, "prompt_logprobs": 1, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    async with openai_client(demo) as api:
        file = await api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await api.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await api.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        answer = json.loads((await api.files.content(batch.output_file_id)).text)
    async with http_client(demo) as http:
        direct = (await http.post(CHAT, json=body)).json()
    found, expected = answer["response"]["body"]["prompt_logprobs"], direct["prompt_logprobs"]
    assert [each and list(each) for each in found] == [each and list(each) for each in expected]
