"""Speculation through the queue: the option of a job, its stats, and the counters of the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamaq.producer import Client, JobOptions

if TYPE_CHECKING:
    from tests.e2e.conftest import Await

REPEATING: JobOptions = {"temperature": 0, "logit_bias": {300: 100.0}, "max_tokens": 60}
"""The model generates token 300 again and again."""
WITH_LOGPROBS: JobOptions = {**REPEATING, "logprobs": 1}
WITHOUT_DRAFTS: JobOptions = {**WITH_LOGPROBS, "draft_max": 0}


def test_a_text_that_repeats_itself_is_drafted_unless_the_job_refuses(narrow_client: Client, wait_for: Await) -> None:
    drafted = narrow_client.generate("Begin", **WITH_LOGPROBS)
    plain = narrow_client.generate("Begin", **WITHOUT_DRAFTS)
    assert drafted.tokens == plain.tokens == (300,) * 60
    assert drafted.stats.drafted_tokens >= drafted.stats.accepted_tokens > 0
    assert plain.stats.drafted_tokens == plain.stats.accepted_tokens == 0
    assert drafted.logprobs is not None
    assert len(drafted.logprobs) == 60
    totals = wait_for(lambda: narrow_client.workers()[0].totals if narrow_client.workers()[0].totals.drafts else None)
    assert totals.drafted_tokens >= totals.accepted_tokens > 0
    assert totals.decode_tokens > totals.accepted_tokens
    assert narrow_client.workers()[0].card.speculation == "ngram"


def test_tokens_of_one_draft_are_streamed_together_and_in_order(narrow_client: Client) -> None:
    chunks = list(narrow_client.submit("Begin", **REPEATING).stream())
    assert [token for chunk in chunks for token in chunk.tokens] == [300] * 60
