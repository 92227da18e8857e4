"""A worker with LoRA adapters writes what a worker writes whose model has the changes in its own weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.e2e.conftest import ServedQueue
from tests.support.http_clients import http_client
from tests.support.lora_files import write_lora, write_merged
from tests.support.workers import only_worker

from llamaq.producer import LoraScale
from llamaq.tools.random_gguf import PLAIN, Weights, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import StartWorker

PROMPTS = [[number, *range(40, 60)] for number in range(5, 11)]


@pytest.fixture(scope="session")
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
