"""Speculation through the queue: the option of a job, its stats, and the counters of the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.workers import only_worker

from llamaq.common.protocol.job_outcome import Result
from llamaq.producer import Client, JobOptions
from llamaq.tools.random_gguf import PLAIN, write_model

if TYPE_CHECKING:
    from tests.e2e.conftest import Await, ServedQueue, StartWorker

    from llamaq.common.protocol.queue_and_worker_state import TickTotals

REPEATING: JobOptions = {"temperature": 0, "logit_bias": {300: 100.0}, "max_tokens": 60}
"""The model generates token 300 again and again."""
WITH_LOGPROBS: JobOptions = {**REPEATING, "logprobs": 1}
WITHOUT_DRAFTS: JobOptions = {**WITH_LOGPROBS, "draft_max": 0}


def totals_with_accepted_drafts(client: Client) -> TickTotals | None:
    """Return the worker's counters once they count an accepted draft: a heartbeat reports them after the job's end."""
    totals = only_worker(client).totals
    return totals if totals.accepted_tokens else None


def test_a_text_that_repeats_itself_is_drafted_unless_the_job_refuses(narrow_client: Client, wait_for: Await) -> None:
    plain = narrow_client.generate("Begin", **WITHOUT_DRAFTS)

    def generate_drafted() -> Result | None:
        result = narrow_client.generate("Begin", **WITH_LOGPROBS)
        assert result.tokens == plain.tokens == (300,) * 60
        return result if result.stats.accepted_tokens else None

    drafted = wait_for(generate_drafted)  # a worker that was slowed down finds at first that drafts gain nothing
    assert drafted.stats.drafted_tokens >= drafted.stats.accepted_tokens > 0
    assert plain.stats.drafted_tokens == plain.stats.accepted_tokens == 0
    assert drafted.logprobs is not None
    assert len(drafted.logprobs) == 60
    totals = wait_for(lambda: totals_with_accepted_drafts(narrow_client))
    assert totals.drafted_tokens >= totals.accepted_tokens > 0
    assert totals.decode_tokens > totals.accepted_tokens
    assert only_worker(narrow_client).card.speculation == "ngram"


@pytest.fixture(scope="module")
def with_draft_model(start_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> ServedQueue:
    """A worker whose draft model has the first layers of its model, so that it is always right."""
    folder = tmp_path_factory.mktemp("draft")
    draft = write_model(folder / "draft.gguf", replace(PLAIN, n_layers=1))
    target = write_model(folder / "target.gguf", replace(PLAIN, n_layers=12, n_silent_layers=11))
    return start_worker(
        "drafts", target, n_ctx=1024, heartbeat_s=0.2, speculation="model", model_draft=str(draft), draft_max=8
    )


def test_a_draft_model_drafts_and_the_output_is_that_without_drafts(
    with_draft_model: ServedQueue, wait_for: Await
) -> None:
    with with_draft_model.client() as client:
        expected = client.generate("Begin", temperature=0, max_tokens=100, draft_max=0)
        assert expected.stats.drafted_tokens == 0

        def drafted() -> Result | None:
            result = client.generate("Begin", temperature=0, max_tokens=100)
            assert result.tokens == expected.tokens
            return result if result.stats.drafted_tokens else None

        stats = wait_for(drafted).stats
        assert stats.drafted_tokens >= stats.accepted_tokens > 0
        totals = wait_for(lambda: totals_with_accepted_drafts(client))
        assert totals.drafted_tokens >= totals.accepted_tokens > 0
        assert only_worker(client).card.speculation == "model"


def test_tokens_of_one_draft_are_streamed_together_and_in_order(narrow_client: Client) -> None:
    chunks = list(narrow_client.submit("Begin", **REPEATING).stream())
    assert [token for chunk in chunks for token in chunk.tokens] == [300] * 60
