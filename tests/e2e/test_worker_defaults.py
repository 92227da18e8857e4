"""Defaults of a worker for seed and grammar: they apply to jobs that set nothing themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import StartWorker


def test_a_job_without_seed_and_grammar_gets_those_of_its_worker(start_worker: StartWorker, demo_model: Path) -> None:
    served = start_worker("defaults", demo_model, seed=7, grammar='answer ::= "yes" | "no"', grammar_root="answer")
    with served.client() as client:
        first, second = client.generate("x"), client.generate("x")
        assert first.text == second.text
        assert first.text in ("yes", "no")
        assert (first.seed, second.seed, first.stats.seed) == (7, 7, 7)
        assert client.generate("x", seed=8).seed == 8
        assert client.generate("x", grammar='answer ::= "perhaps"').text == "perhaps"
        assert client.generate("x", json_schema={"const": 5}).text == "5"
        assert len(client.generate("x", grammar="", ignore_eos=True, max_tokens=20).tokens) == 20
        complete = client.generate("x", ignore_eos=True)
        assert (complete.text in ("yes", "no"), complete.finish_reason) == (True, "stop")
