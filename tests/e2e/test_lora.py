"""A worker with LoRA adapters writes what a worker writes whose model has the changes in its own weights."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.e2e.conftest import ServedQueue
from tests.support.http_clients import http_client, openai_client
from tests.support.lora_files import write_lora, write_merged
from tests.support.workers import only_worker

from llamaq.producer import AsyncClient, InvalidRequest, Job, JobFailed, LoraScale, Result
from llamaq.tools.random_gguf import PLAIN, Weights, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import StartWorker

PROMPTS = [[number, *range(40, 60)] for number in range(5, 11)]


@pytest.fixture(scope="module")
def queues(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedQueue, ...]:
    """The queues of a worker with an adapter, of one with the changed model, and of one with the model itself."""
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", replace(PLAIN, weights=Weights.F32))
    lora = write_lora(folder / "style.gguf", model)
    merged = write_merged(folder / "merged.gguf", model, lora, 0.5)
    return (
        start_worker("lora", model, lora=(f"{lora}:0.5",), cache_dir=str(folder / "cache")),
        start_worker("lora-merged", merged),
        start_worker("lora-none", model),
    )


def test_jobs_are_computed_with_the_adapter(queues: tuple[ServedQueue, ...]) -> None:
    outputs = []
    for served in queues:
        with served.client() as client:
            jobs = [client.submit(tokens=prompt, max_tokens=12, temperature=0) for prompt in PROMPTS * 2]
            outputs.append([job.result().tokens for job in jobs])
    with_adapter, merged, without = outputs
    assert with_adapter == merged
    assert with_adapter != without


def test_the_card_names_the_adapter_and_has_another_fingerprint(queues: tuple[ServedQueue, ...]) -> None:
    cards = []
    for served in queues:
        with served.client() as client:
            cards.append(only_worker(client).card)
    assert [card.lora for card in cards] == [(LoraScale(name="style.gguf", scale=0.5),), (), ()]
    assert len({card.model_hash for card in cards}) == 3


async def test_the_http_server_lists_the_adapters_and_their_scales(queues: tuple[ServedQueue, ...]) -> None:
    found = []
    for served in queues[:2]:
        async with http_client(served) as http:
            adapters = (await http.get("/lora-adapters", params={"model": served.queue})).json()
            props = (await http.get("/props", params={"model": served.queue})).json()
        found.append((adapters, props["default_generation_settings"]["params"]["lora"]))
    assert found == [([{"id": 0, "path": "style.gguf", "scale": 0.5}], [{"id": 0, "scale": 0.5}]), ([], [])]


NEAR_TIE = 0.02
"""Difference of the logarithms of two probabilities. The shape of a batch changes them by a tenth of it."""
SCALES: tuple[dict[str, float] | None, ...] = (None, {"style.gguf": 2}, {"1": 1}, {"0": 1, "terms.gguf": 0.5})


@pytest.fixture(scope="module")
def mixed(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """The queue of a worker with two adapters. One of them is off, unless a job asks for it."""
    folder = tmp_path_factory.mktemp("mixed")
    model = write_model(folder / "model.gguf", replace(PLAIN, weights=Weights.F32))
    # Larger changes would let the model write tokens that are all improbable, and the rounding would choose among them.
    style, terms = (
        write_lora(folder / f"{name}.gguf", model, seed=seed, strength=0.3)
        for seed, name in enumerate(("style", "terms"))
    )
    return start_worker("lora-mixed", model, lora=(str(style), f"{terms}:0"), n_parallel=6, cache_ram_mb=16)


def n_before_a_near_tie(result: Result) -> int:
    """Return the number of tokens before the first one that rounding could replace by another one."""
    tops = [token.top for token in result.logprobs or ()]
    return next((number for number, ((_, best), (_, second)) in enumerate(tops) if best - second < NEAR_TIE), len(tops))


def test_jobs_with_other_scales_run_at_once_and_share_no_cells(mixed: ServedQueue) -> None:
    work = [(scales, prompt) for prompt in PROMPTS for scales in SCALES]
    with mixed.client() as client:

        def submit(scales: dict[str, float] | None, prompt: list[int], *, cache_prompt: bool) -> Job:
            return client.submit(
                tokens=prompt, max_tokens=24, temperature=0, logprobs=2, cache_prompt=cache_prompt, lora=scales
            )

        alone = [submit(*each, cache_prompt=False).result() for each in work]
        at_once = [[submit(*each, cache_prompt=True) for each in work] for _ in range(2)]
        results = [[job.result() for job in jobs] for jobs in at_once]
    n_sure = [n_before_a_near_tie(result) for result in alone]
    expected = [result.tokens[:n] for result, n in zip(alone, n_sure, strict=True)]
    for found in results:
        assert [result.tokens[:n] for result, n in zip(found, n_sure, strict=True)] == expected
    assert sum(n_sure) > 6 * len(work), "many tokens are compared"
    assert any(result.stats.prefix_cache_tokens for result in results[1])
    for number in range(len(SCALES) - 1):
        assert expected[number :: len(SCALES)] != expected[number + 1 :: len(SCALES)]


def test_a_job_that_asks_for_an_unknown_adapter_fails(mixed: ServedQueue) -> None:
    with mixed.client() as client:
        with pytest.raises(
            JobFailed, match=r"no adapter 'poems'; its adapters are: 0 \(style.gguf\), 1 \(terms.gguf\)"
        ):
            client.generate("Hello", lora={"poems": 1}, max_tokens=2)
        with pytest.raises(InvalidRequest, match="lora"):
            client.submit("Hello", lora={"style.gguf": float("nan")})


async def test_the_http_server_takes_the_scales_of_llama_server(mixed: ServedQueue) -> None:
    body = {"prompt": PROMPTS[0], "n_predict": 12, "temperature": 0, "return_tokens": True, "model": mixed.queue}
    async with http_client(mixed) as http:
        bodies = [{**body, "lora": lora} for lora in ([], [{"id": 0, "scale": 2}], [{"id": 1}])]
        plain, other, wrong = [await http.post("/completion", json=each) for each in bodies]
    expected = []
    async with AsyncClient(mixed.url, mixed.queue) as client:
        for scales in SCALES[:2]:
            result = await client.generate_tokens(PROMPTS[0], max_tokens=12, temperature=0, lora=scales)
            expected.append(result.tokens)
    assert [tuple(answer.json()["tokens"]) for answer in (plain, other)] == expected
    assert other.json()["generation_settings"]["lora"] == [{"id": 0, "scale": 2}, {"id": 1, "scale": 0}]
    assert wrong.status_code == 400
    assert "lora: a list of adapters is required" in wrong.text


async def test_an_adapter_is_a_model_of_the_http_server(mixed: ServedQueue) -> None:
    expected = []
    async with AsyncClient(mixed.url, mixed.queue) as client:
        for scales in (None, {"style.gguf": 1}, {"terms.gguf": 1}, {"style.gguf": 2}):
            result = await client.generate_tokens(PROMPTS[0], max_tokens=12, temperature=0, lora=scales)
            expected.append(result.text)
    assert len({*expected}) == 3  # the worker's own scales are those of `style` alone
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    async with http_client(mixed) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        shown = (await http.get("/v1/models/terms")).json()
        unknown = await http.post("/v1/completions", json={**body, "model": "poems"})
        answers = [
            (await http.post("/v1/completions", json={**body, "model": model, **more})).json()
            for model, more in (
                (mixed.queue, {}),
                ("style", {}),
                ("terms.gguf", {}),
                ("terms", {"lora": [{"id": 0, "scale": 2}]}),
            )
        ]
        native = (await http.post("/completion", json={**body, "model": "terms"})).json()
    assert [answer["choices"][0]["text"] for answer in answers] == expected
    assert [answer["model"] for answer in answers] == [mixed.queue, "style", "terms.gguf", "terms"]
    assert native["content"] == expected[2]
    assert native["generation_settings"]["lora"] == [{"id": 0, "scale": 0}, {"id": 1, "scale": 1}]
    by_id = {each["id"]: each for each in listed}
    assert by_id["terms"] == shown
    assert (by_id["style"]["parent"], by_id[mixed.queue]["parent"]) == (mixed.queue, None)
    assert unknown.status_code == 404


async def test_a_batch_is_computed_with_the_adapter_that_its_lines_name(mixed: ServedQueue) -> None:
    body = {"model": "terms", "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0}
    lines = [body, {**body, "lora": {"style.gguf": 2}}]
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": line}
        for number, line in enumerate(lines)
    ]
    async with AsyncClient(mixed.url, mixed.queue) as client:
        options = ({"terms.gguf": 1}, {"style.gguf": 2})
        results = [
            await client.generate_tokens(PROMPTS[1], max_tokens=12, temperature=0, lora=scales) for scales in options
        ]
    async with openai_client(mixed) as api:
        file = await api.files.create(
            file=("in.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()), purpose="batch"
        )
        batch = await api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await api.batches.retrieve(batch.id)
        assert (batch.status, batch.model) == ("completed", "terms")
        assert batch.output_file_id is not None
        answers = [json.loads(line) for line in (await api.files.content(batch.output_file_id)).text.splitlines()]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    assert texts == {str(number): result.text for number, result in enumerate(results)}
