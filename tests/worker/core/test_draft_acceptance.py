from __future__ import annotations

import pytest

from llamaq.worker.core.draft_acceptance import DraftAcceptance


def test_the_estimate_follows_the_drafts_and_newer_ones_count_more() -> None:
    acceptance = DraftAcceptance(0.5)
    assert acceptance.probability == pytest.approx(0.5)
    for _ in range(5):
        acceptance.record(4, 0)
    assert acceptance.probability < 0.1
    acceptance.record(8, 8)
    assert acceptance.probability > 0.6
    for _ in range(20):
        acceptance.record(8, 8)
    assert acceptance.probability > 0.98


def test_only_the_first_token_that_is_not_accepted_counts_as_a_failure() -> None:
    acceptance = DraftAcceptance(0.5)
    for _ in range(100):
        acceptance.record(10, 3)
    assert acceptance.probability == pytest.approx(3 / 4)
