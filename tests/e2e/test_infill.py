"""`/infill` of llama-server, and `suffix` of OpenAI's completions: a worker makes the prompt with the gap."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_clients import http_client

from llamaq.common.protocol.text_commands import Infill, Snippet
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer import AsyncClient, InvalidRequest
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.infill_prompt import encode_infill

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import ServedQueue, StartWorker

TAGS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
GREEDY = {"temperature": 0, "n_predict": 12}
GAP: dict[str, Any] = {
    "input_prefix": "def add(a, b):\n    ",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "prompt": "ret",
    "input_extra": [{"text": "x = 1\n", "filename": "x.py"}, {"text": "y = 2\n"}],
}
INFILL = Infill(
    prefix=GAP["input_prefix"],
    suffix=GAP["input_suffix"],
    begun="ret",
    snippets=(Snippet(text="x = 1\n", filename="x.py"), Snippet(text="y = 2\n")),
    max_tokens=12,
)


@pytest.fixture(scope="module")
def gap_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("infill") / "gaps.gguf", replace(PLAIN, control_tags=TAGS))


@pytest.fixture(scope="module")
def coder(start_worker: StartWorker, gap_file: Path) -> ServedQueue:
    return start_worker("infill", gap_file)


async def expected(served: ServedQueue, model: Path, infill: Infill) -> tuple[list[int], str]:
    """Return the prompt of a text with a gap, and what the worker writes after it."""
    async with AsyncClient(served.url, served.queue) as client:
        (worker,) = await client.workers()
        prompt = encode_infill(Vocab.from_blob(extract_vocab(model)), infill, worker.card.context_limit)
        return prompt, (await client.generate_tokens(prompt, temperature=0, max_tokens=12)).text


async def test_a_client_gets_the_prompt_and_fills_the_gap(coder: ServedQueue, gap_file: Path) -> None:
    prompt, text = await expected(coder, gap_file, INFILL)
    async with AsyncClient(coder.url, coder.queue) as client:
        tokens = await client.tokenize_infill(
            INFILL.prefix, INFILL.suffix, begun=INFILL.begun, snippets=INFILL.snippets, max_tokens=12
        )
        assert tokens == prompt
        assert (await client.generate_tokens(tokens, temperature=0, max_tokens=12)).text == text
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.tokenize_infill("a", "b", max_tokens=0)


async def test_a_gap_is_filled_with_and_without_a_stream(coder: ServedQueue, gap_file: Path) -> None:
    prompt, text = await expected(coder, gap_file, INFILL)
    async with http_client(coder) as http:
        whole = (await http.post("/infill", json={**GAP, **GREEDY})).json()
        streamed = await http.post("/infill", json={**GAP, **GREEDY, "stream": True})
        other = (await http.post("/infill", json={**GAP, **GREEDY, "prompt": "", "input_extra": None})).json()
    assert (whole["content"], whole["tokens_evaluated"]) == (text, len(prompt))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["content"] for line in lines) == text
    assert other["tokens_evaluated"] < len(prompt)


async def test_a_completion_with_a_suffix_fills_the_gap_before_it(coder: ServedQueue, gap_file: Path) -> None:
    infill = Infill(prefix=GAP["input_prefix"], suffix=GAP["input_suffix"], max_tokens=12)
    prompt, text = await expected(coder, gap_file, infill)
    body = {"prompt": infill.prefix, "temperature": 0, "max_tokens": 12}
    async with http_client(coder) as http:
        answer = (await http.post("/v1/completions", json={**body, "suffix": infill.suffix})).json()
        plain = (await http.post("/v1/completions", json={**body, "suffix": ""})).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert plain["usage"]["prompt_tokens"] < len(prompt)


async def test_an_editor_fills_the_cache_before_it_needs_an_answer(coder: ServedQueue, gap_file: Path) -> None:
    gap = {**GAP, "prompt": "", "input_prefix": "cached " * 50, "input_suffix": ""}
    ahead = {
        **gap,
        "n_predict": 0,
        "samplers": [],
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
        "response_fields": [""],
    }
    async with http_client(coder) as http:
        warmed = await http.post("/infill", json=ahead)
        answer = (await http.post("/infill", json={**gap, **GREEDY})).json()
    assert (warmed.status_code, warmed.json()) == (200, {})
    assert answer["timings"]["cache_n"] >= answer["tokens_evaluated"] - 1


LLAMA_VIM: dict[str, Any] = {
    "n_predict": 12,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
}
"""The fields of a request of llama.vim for a completion, besides the texts: autoload/llama.vim, `llama#fim`."""


async def test_llama_vim_gets_its_completion(coder: ServedQueue, gap_file: Path) -> None:
    async with http_client(coder) as http:
        answer = await http.post("/infill", json={**GAP, **LLAMA_VIM})
    body = answer.json()
    assert (answer.status_code, set(body)) == (200, set(LLAMA_VIM["response_fields"])), body
    assert body["timings/prompt_n"] > 0
    assert isinstance(body["content"], str)


async def test_an_editor_gets_the_sampler_the_indentation_and_the_time_that_it_asks_for(
    coder: ServedQueue, gap_file: Path
) -> None:
    line_breaks = {"logit_bias": {"\n": 30, " ": 29}, "seed": 1, "temperature": 1, "n_predict": 40}
    async with http_client(coder) as http:
        whole = (await http.post("/infill", json={**GAP, **line_breaks})).json()
        dedented = (await http.post("/infill", json={**GAP, **line_breaks, "n_indent": 2})).json()
        timed = (await http.post("/infill", json={**GAP, **line_breaks, "t_max_predict_ms": 1e-6})).json()
        sure = (await http.post("/infill", json={**GAP, "n_predict": 12, "samplers": ["infill"]})).json()
    _, *lines = whole["content"].split("\n")
    assert (len(whole["tokens"]) or whole["tokens_predicted"], len(lines) > 2) == (40, True)
    first_line, _, _ = whole["content"].partition("\n")
    assert dedented["content"].startswith(first_line + "\n")
    assert all(line.startswith("  ") for line in dedented["content"].split("\n")[1:-1])
    assert (dedented["stop_type"], len(dedented["content"]) < len(whole["content"])) == ("eos", True)
    assert timed["content"] in (first_line + "\n", whole["content"][: len(first_line) + 2])
    assert timed["stop_type"] == "limit"
    assert sure["stop_type"] == "eos"  # the model is random, so no token has a probability of 0.2


@pytest.mark.parametrize(
    ("path", "changed", "reason"),
    [
        ("/infill", {"input_prefix": None}, "input_prefix: a text is required"),
        ("/infill", {"input_suffix": 1}, "input_suffix: a text is required"),
        ("/infill", {"prompt": [1]}, "prompt: a text is required"),
        ("/infill", {"input_extra": [{"filename": "x"}]}, "input_extra: a list of objects"),
        ("/infill", {"input_extra": [{"text": "x", "filename": 1}]}, "filename"),
        ("/v1/completions", {"suffix": 1}, "suffix: a text is required"),
        ("/v1/completions", {"suffix": "x", "prompt": ["a", "b"]}, "suffix: the prompt must be one text"),
        ("/v1/completions", {"suffix": "x", "echo": True}, "echo: not supported together with suffix"),
        ("/completion", {"suffix": "x"}, "suffix: llamaq does not support it"),
    ],
)
async def test_a_wrong_field_is_named(coder: ServedQueue, path: str, changed: dict[str, Any], reason: str) -> None:
    async with http_client(coder) as http:
        answer = await http.post(path, json={**GAP, **GREEDY, **changed})
    assert (answer.status_code, reason in answer.text) == (400, True), answer.text


async def test_a_model_that_fills_no_gaps_says_so(demo: ServedQueue) -> None:
    async with http_client(demo) as http:
        answers = [
            await http.post("/infill", json=GAP),
            await http.post("/v1/completions", json={"prompt": "a", "suffix": "b"}),
        ]
    for answer in answers:
        assert answer.status_code == 400
        assert "this model does not fill gaps" in answer.text
