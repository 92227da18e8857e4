"""A worker with a control vector writes what a worker writes whose model adds the same directions by a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.e2e.conftest import ServedQueue
from tests.support.control_vector_files import draw_directions, write_biased, write_control_vector
from tests.support.workers import only_worker

from llamaq.tools.random_gguf import PLAIN, Weights, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import StartWorker

PROMPTS = [[number, *range(40, 60)] for number in range(5, 11)]


@pytest.fixture(scope="module")
def queues(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedQueue, ...]:
    """The queues of a worker with a vector, of one with the biased model, and of one with the model itself."""
    folder = tmp_path_factory.mktemp("control-vectors")
    model = write_model(folder / "model.gguf", replace(PLAIN, n_layers=3, n_silent_layers=0, weights=Weights.F32))
    directions = draw_directions(model, 1, 2)
    vector = write_control_vector(folder / "happy.gguf", directions)
    biased = write_biased(folder / "biased.gguf", model, {2: directions[2]}, 0.5)
    settings = {"control_vector": (f"{vector}:0.5",), "control_vector_layer_range": (2, 2)}
    return (
        start_worker("control-vector", model, **settings, cache_dir=str(folder / "cache")),
        start_worker("control-vector-biased", biased),
        start_worker("control-vector-none", model),
    )


def test_jobs_are_computed_with_the_vector(queues: tuple[ServedQueue, ...]) -> None:
    outputs = []
    for served in queues:
        with served.client() as client:
            jobs = [client.submit(tokens=prompt, max_tokens=12, temperature=0) for prompt in PROMPTS * 2]
            outputs.append([job.result().tokens for job in jobs])
    with_vector, biased, without = outputs
    assert with_vector == biased
    assert with_vector != without


def test_a_worker_with_a_vector_has_another_fingerprint(queues: tuple[ServedQueue, ...]) -> None:
    hashes = set()
    for served in queues:
        with served.client() as client:
            hashes.add(only_worker(client).card.model_hash)
    assert len(hashes) == 3
