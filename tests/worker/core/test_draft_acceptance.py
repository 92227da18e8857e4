from __future__ import annotations

import pytest

from llamaq.worker.core.draft_acceptance import FIRST_PAUSE, LONGEST_PAUSE, Acceptance, Retries


def test_the_estimate_follows_the_drafts_and_newer_ones_count_more() -> None:
    acceptance = Acceptance(0.5)
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
    acceptance = Acceptance(0.5)
    for _ in range(100):
        acceptance.record(10, 3)
    assert acceptance.probability == pytest.approx(3 / 4)


def test_drafts_without_promise_are_retried_after_pauses_that_double_until_one_succeeds() -> None:
    retries = Retries()
    gaps: list[int] = []
    n_passed = 0
    while len(gaps) < 6:
        n_passed += 1
        if retries.is_due():
            gaps.append(n_passed)
            n_passed = 0
            retries.record(0)
    assert gaps == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    retries.record(1)
    assert [retries.is_due() for _ in range(FIRST_PAUSE)] == [False] * (FIRST_PAUSE - 1) + [True]
