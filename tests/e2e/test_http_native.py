"""llama-server's own endpoints of `llamaq serve`, in front of a real worker."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.http_clients import http_client

from llamaq.producer import Client

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import ServedQueue, StartWorker

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hello"}]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_completion_has_the_fields_of_llama_server(demo: ServedQueue, client: Client) -> None:
    expected = client.generate(PROMPT, max_tokens=8, temperature=0)
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "return_tokens": True}
    async with http_client(demo) as http:
        answer = (await http.post("/completion", json=body)).json()
        events = events_of(await http.post("/completions", json={**body, "stream": True}))
        several = (await http.post("/completion", json={**body, "prompt": [PROMPT, "A dog"]})).json()
        word = (await http.post("/completion", json={**body, "stop": [expected.text[3:5]]})).json()
    assert answer["content"] == expected.text
    assert answer["tokens"] == list(expected.tokens)
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 8)
    assert answer["generation_settings"]["n_predict"] == 8
    assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"]
    assert "".join(event["content"] for event in events) == expected.text
    assert [token for event in events for token in event["tokens"]] == list(expected.tokens)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert [each["index"] for each in several] == [0, 1]
    assert several[0]["content"] == expected.text
    assert (word["stop_type"], word["stopping_word"]) == ("word", expected.text[3:5])


async def test_prompts_and_biases_may_mix_texts_and_tokens(demo: ServedQueue, client: Client) -> None:
    tokens = client.tokenize(PROMPT)
    expected = client.generate(PROMPT, max_tokens=8, temperature=0)
    common = {"n_predict": 8, "temperature": 0}
    async with http_client(demo) as http:

        async def text_of(prompt: Any, **more: Any) -> str:
            answer = await http.post("/completion", json={"prompt": prompt, **common, **more})
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["content"]
            return text

        prompts = [{"prompt_string": PROMPT}, ["Once", *client.tokenize(" upon a time")[-3:]], tokens]
        texts = [await text_of(prompt) for prompt in prompts]
        several = (await http.post("/completion", json={"prompt": [tokens, PROMPT], **common})).json()
        banned = [await text_of(PROMPT, logit_bias=bias) for bias in ([[expected.text, -100]], {expected.text: -100})]
        image = {"prompt_string": PROMPT, "multimodal_data": ["eA=="]}
        refused = await http.post("/completion", json={"prompt": image})
        echoed = await http.post("/v1/completions", json={"prompt": {"prompt_string": PROMPT}, "max_tokens": 1})
    assert texts[0] == texts[2] == expected.text
    assert [each["content"] for each in several] == [expected.text] * 2
    assert not {expected.text[:1], *banned} & {expected.text}
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt.multimodal_data")
    assert echoed.json()["usage"]["completion_tokens"] == 1


async def test_an_answer_tells_what_the_request_asked_for(demo: ServedQueue) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    asked = {"prompt": PROMPT, "response_fields": ["content", "generation_settings/n_predict"]}
    long_chat = [{"role": "user", "content": "word " * 3000}]
    async with http_client(demo, default_max_tokens=3) as http:
        fields = (await http.post("/completion", json=asked)).json()
        verbose = (await http.post("/v1/chat/completions", json={**chat, "verbose": True})).json()
        plain = (await http.post("/v1/chat/completions", json=chat)).json()
        rendered = (await http.post("/apply-template", json={"messages": MESSAGES})).json()
        too_long = [
            await http.post("/v1/chat/completions", json={"messages": long_chat, "stream": stream})
            for stream in (False, True)
        ]
        probabilities = await http.post(
            "/completion", json={"prompt": PROMPT, "n_predict": 4, "n_probs": 2, "stream": True}
        )
        few = {"prompt": PROMPT, "n_predict": 4, "n_probs": 9, "top_k": 3, "post_sampling_probs": True}
        drawn = (await http.post("/completion", json=few)).json()["completion_probabilities"]
        props = (await http.get("/props")).json()
        both = {**chat, "messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}
        excluded = await http.post(
            "/v1/chat/completions", json={**both, "add_generation_prompt": True, "continue_final_message": True}
        )
    assert fields.keys() == {"content", "generation_settings/n_predict"}
    assert fields["generation_settings/n_predict"] == 3
    assert verbose["__verbose"]["prompt"] == rendered["prompt"]
    assert verbose["__verbose"]["generation_settings"]["n_predict"] == 2
    assert "__verbose" not in plain
    for each in too_long:
        error = each.json()["error"]
        assert (each.status_code, error["type"]) == (400, "exceed_context_size_error")
        assert error["n_prompt_tokens"] > error["n_ctx"] == props["default_generation_settings"]["n_ctx"] > 0
    tokens = [event["completion_probabilities"] for event in events_of(probabilities) if not event["stop"]]
    assert [len(each) for each in tokens] == [1] * 4
    assert [len(each[0]["top_logprobs"]) for each in tokens] == [2] * 4
    for each in drawn:
        assert 0 < each["prob"] <= 1
        assert len(each["top_probs"]) <= 3
        assert sum(alternative["prob"] for alternative in each["top_probs"]) == pytest.approx(1, abs=1e-3)
    assert (excluded.status_code, excluded.json()["error"]["param"]) == (400, "add_generation_prompt")


async def test_texts_become_tokens_and_tokens_texts(demo: ServedQueue, client: Client) -> None:
    tokens = client.tokenize("Once é")
    async with http_client(demo) as http:

        async def post(path: str, **body: Any) -> Any:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        bare = await post("/tokenize", content="Once é")
        special = await post("/tokenize", content="Once é", add_special=True)
        pieces = await post("/tokenize", content="Once é", with_pieces=True)
        bos = (await http.get("/tokenizer_info")).json()["bos_token"]
        plain = await post("/tokenize", content=bos, parse_special=False)
        parsed = await post("/tokenize", content=bos)
        vllm = await post("/tokenize", messages=MESSAGES)
        text = await post("/detokenize", tokens=bare["tokens"])
        rendered = await post("/apply-template", messages=MESSAGES)
        counted = await post("/v1/chat/completions/input_tokens", messages=MESSAGES)
        refused = await http.post("/detokenize", json={"tokens": [10**6]})
    assert special["tokens"] == tokens
    assert len(plain["tokens"]) > len(parsed["tokens"]) == 1
    n_added = len(tokens) - len(bare["tokens"])
    assert bare["tokens"] == tokens[n_added:]
    assert client.tokenize("") == tokens[:n_added]
    assert [piece["id"] for piece in pieces["tokens"]] == bare["tokens"]
    joined = b"".join(
        bytes(piece["piece"]) if isinstance(piece["piece"], list) else piece["piece"].encode()
        for piece in pieces["tokens"]
    )
    assert joined.decode() == text["content"] == text["prompt"]
    assert text["content"].strip() == "Once é"
    assert rendered["prompt"] == client.apply_template(MESSAGES)
    assert vllm["count"] == counted["input_tokens"] == len(client.tokenize_chat(MESSAGES))
    assert refused.status_code == 400


async def test_slots_props_and_metrics_show_the_worker(
    start_worker: StartWorker, demo_model: Path, tmp_path: Path
) -> None:
    served = start_worker("http-slots", demo_model, cache_dir=str(tmp_path))
    with served.client() as client:
        client.generate(PROMPT, max_tokens=4, slot=1)
    async with http_client(served) as http:
        slots = (await http.get("/slots")).json()
        props = (await http.get("/props", params={"model": served.queue})).json()
        tokenizer = (await http.get("/tokenizer_info")).json()
        saved = await http.post("/slots/1?action=save", json={"filename": "http.bin"})
        restored = await http.post("/slots/1?action=restore", json={"filename": "http.bin"})
        erased = await http.post("/slots/1?action=erase", json={})
        unknown = [
            await http.post("/slots/1?action=save", json={"filename": "../../etc/passwd"}),
            await http.post("/slots/77?action=erase"),
            await http.post("/slots/1?action=fly"),
        ]
        metrics = (await http.get("/metrics")).text
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert props["total_slots"] == 4
    assert props["chat_template"] == tokenizer["chat_template"] != ""
    with served.client() as client:
        assert client.tokenize(props["eos_token"])[-1] in client.workers()[0].card.end_tokens
        assert client.tokenize(props["bos_token"])[-1] == client.tokenize("")[0]
    assert [tokenizer[name] for name in ("bos_token", "eos_token")] == [props["bos_token"], props["eos_token"]]
    assert saved.json()["n_saved"] == restored.json()["n_restored"] > 0
    assert saved.json()["filename"] == "http.bin"
    assert erased.json()["n_erased"] == saved.json()["n_saved"]
    assert [each.status_code for each in unknown] == [400, 400, 400]
    assert "llamacpp:tokens_predicted_total " in metrics
    assert "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 0\n" in metrics
