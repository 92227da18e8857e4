"""The soak's checker finds every kind of violation: each test records events with one defect."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.soak.chaos import POINTS, KillPlan, draw_job, phase_of, seeded_random
from tests.soak.checker import RESULT, STORED, Checker, Verdict
from tests.soak.report import Outcome, percentiles
from tests.soak.scenarios.cancels import Record

from llamaq.common.protocol.job_events import Event, Failed, Finished, Started, Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result

JOB = "q.0.0"
READER = "reader"


def tokens(offset: int, *ids: int) -> Tokens:
    """Return an event in which each token is one letter of the text."""
    return Tokens(offset=offset, tokens=ids, text_offset=offset, text="".join(map(letter, ids)))


def letter(token: int) -> str:
    return chr(ord("a") + token)


END = Finished(finish_reason=FinishReason.LENGTH, stats=JobStats())
STREAM: list[Event] = [Started(attempt=1, worker="w"), tokens(0, 1, 2), tokens(2, 3), tokens(3, 4, 5), END]


def seen(stored: list[Event], read: list[Event], **demands: int | str | bool) -> Checker:
    checker = Checker()
    checker.accept(JOB, **{"n_tokens": 5, **demands})
    checker.record_start(STORED, JOB)
    checker.record_start(READER, JOB)
    for event in stored:
        checker.record_event(STORED, JOB, event)
    for event in read:
        checker.record_event(READER, JOB, event)
    return checker


def violations(verdict: Verdict) -> set[str]:
    """Return the kinds of violations in a verdict."""
    return {kind for kind, count in verdict.counts.items() if count}


def test_a_stream_read_as_it_was_stored_has_no_violation() -> None:
    verdict = seen(STREAM, STREAM[1:]).judge()
    assert verdict.is_clean
    assert list(verdict.lines()) == []
    assert (verdict.n_jobs, verdict.n_readings, verdict.n_tokens) == (1, 2, 5)


def test_a_stream_read_in_other_pieces_has_no_violation() -> None:
    assert seen(STREAM, [tokens(0, 1, 2, 3, 4), tokens(4, 5), END]).judge().is_clean


@pytest.mark.parametrize(
    ("fault", "stored", "read"),
    [
        ("lost", STREAM[:-1], STREAM[1:-1]),
        ("lost", [], []),
        ("lost", STREAM, STREAM[1:-1]),
        ("lost", STREAM, []),
        ("gaps", STREAM, [*STREAM[1:2], *STREAM[3:]]),
        ("gaps", STREAM, [*STREAM[1:3], END]),
        ("gaps", [STREAM[0], tokens(0, 1, 2), END], [tokens(0, 1, 2), END]),
        ("gaps", STREAM, [tokens(0, 1, 2, 3, 4, 5).model_copy(update={"text": "bcde"}), END]),
        ("repeats", STREAM, [*STREAM[1:3], *STREAM[2:]]),
        ("repeats", STREAM, [*STREAM[1:3], tokens(2, 3, 4, 5), END]),
        ("repeats", [*STREAM[:4], tokens(5, 6), END], [*STREAM[1:4], tokens(5, 6), END]),
        ("changed", STREAM, [*STREAM[1:3], tokens(3, 4, 9), END]),
        ("changed", STREAM, [*STREAM[1:3], tokens(3, 4, 5).model_copy(update={"text": "xy"}), END]),
        ("second_ends", [*STREAM, END], STREAM[1:]),
        ("second_ends", [*STREAM, Failed(code="internal", message="")], STREAM[1:]),
        ("second_ends", STREAM, [*STREAM[1:], END]),
        ("second_ends", [*STREAM, Started(attempt=2, worker="v")], STREAM[1:]),
    ],
)
def test_a_record_with_one_defect_has_this_kind_of_violation(
    fault: str, stored: list[Event], read: list[Event]
) -> None:
    verdict = seen(stored, read).judge()
    assert fault in violations(verdict)
    assert any(line.startswith(f"{fault}: {JOB}") for line in verdict.lines())


def test_tokens_after_the_terminal_event_are_found() -> None:
    assert {"second_ends"} <= violations(seen([*STREAM, tokens(5, 6)], STREAM[1:]).judge())


def test_a_job_that_fails_or_has_another_finish_reason_is_found() -> None:
    failed = [*STREAM[:-1], Failed(code="internal", message="")]
    assert violations(seen(failed, failed[1:]).judge()) == {"wrong_ends"}
    assert violations(seen(STREAM, STREAM[1:], ending="stop").judge()) == {"wrong_ends"}
    assert seen(failed, failed[1:], ending="failed internal").judge().is_clean


def test_a_text_that_differs_from_the_required_text_is_found() -> None:
    assert seen(STREAM, STREAM[1:], text="bcdef").judge().is_clean
    assert violations(seen(STREAM, STREAM[1:], text="bcdeg").judge()) == {"changed"}


def test_a_result_that_differs_from_the_stream_is_found() -> None:
    checker = seen(STREAM, STREAM[1:])
    ended = {"finish_reason": FinishReason.LENGTH, "stats": JobStats(), "seed": 1}
    checker.record_result(JOB, Result.model_validate({"job_id": JOB, "text": "bcdef", "tokens": (1, 2, 3, 4), **ended}))
    assert violations(checker.judge()) == {"changed", "gaps"}


def test_readers_of_a_job_without_per_token_events_are_compared_with_its_result() -> None:
    def verdict_on(*read: Event) -> Verdict:
        checker = seen([STREAM[0], END], [*read])
        checker.record_start(STORED, JOB, is_whole=False)
        checker.record_start(RESULT, JOB)
        for event in (tokens(0, 1, 2, 3, 4, 5), END):
            checker.record_event(RESULT, JOB, event)
        return checker.judge()

    assert verdict_on(tokens(0, 1, 2, 3, 4, 5), END).is_clean
    assert violations(verdict_on(tokens(0, 1, 2, 3, 4, 6), END)) == {"changed"}


def test_a_reader_that_left_early_may_miss_tokens_but_not_read_repeated_or_different_ones() -> None:
    for read, expected in (
        (STREAM[1:2], set()),
        ([], set()),
        ([*STREAM[1:2], *STREAM[1:2]], {"repeats"}),
        ([tokens(0, 1, 7)], {"changed"}),
    ):
        checker = seen(STREAM, [*read])
        checker.record_start(READER, JOB, is_whole=False)
        assert violations(checker.judge()) == expected


def test_a_cancelled_job_may_have_fewer_but_not_more_tokens() -> None:
    short: list[Event] = [tokens(0, 1), END]
    assert seen(short, short, may_be_short=True).judge().is_clean
    assert violations(seen(STREAM, STREAM[1:], may_be_short=True, n_tokens=4).judge()) == {"repeats"}


def test_a_violation_found_by_a_scenario_fails_the_soak_and_is_shown() -> None:
    checker = seen(STREAM, STREAM[1:])
    checker.add_violation("a target was missed")
    outcome = Outcome("takeover", checker.judge(), {"p99": 9})
    assert outcome.as_json["passed"] is False
    assert "FAILED  takeover" in str(outcome)
    assert "a target was missed" in str(outcome)


def test_a_plan_kills_equally_often_in_every_phase_and_depends_on_the_seed_only() -> None:
    def carried_out(seed: int) -> tuple[KillPlan, list[dict[str, Any]]]:
        plan, given = KillPlan(seeded_random(seed, "kills"), 13), []
        while faults := plan.faults([]):
            given.append(faults)
            plan.note(faults["point"])
        return plan, given

    plan, given = carried_out(1)
    assert plan.is_done
    assert plan.n_done == 13
    assert set(plan.done) == set(POINTS)
    assert set(plan.done.values()) == {2, 3}
    assert carried_out(1)[1] == given
    assert carried_out(2)[1] != given


def test_a_plan_is_not_done_while_a_phase_lacks_kills() -> None:
    plan = KillPlan(random.Random(1), len(POINTS))
    for _ in range(20):
        plan.note("outside")
    assert not plan.is_done
    assert plan.n_done == 1
    assert phase_of("outside") == "outside"


def test_equal_seeds_draw_equal_jobs() -> None:
    first, again, other = (draw_job(seeded_random(seed, "jobs")) for seed in (1, 1, 2))
    assert first == again != other


def test_the_p99_of_few_values_is_their_maximum() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"count": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) == {"count": 0}


def cancelled(state: str, *after: dict[str, object], ticks_between: int = 0) -> Record:
    tick = {"what": "tick", "jobs": {JOB: 1}}
    arrived, applied = {"what": "cancel.arrived", "job": JOB}, {"what": "cancel.applied", "job": JOB, "state": state}
    return Record([tick, arrived, *[tick] * ticks_between, {**applied, "freed": True}, *after])


def test_the_record_of_cancels_counts_the_ticks_until_a_slot_is_free() -> None:
    assert cancelled("decode").ticks_to_free["decode"] == [0]
    assert cancelled("decode", ticks_between=2).ticks_to_free["decode"] == [2]
    assert cancelled("decode").computed_after == []
    assert cancelled("decode", {"what": "tick", "jobs": {JOB: 2}}).computed_after == [JOB]
    assert cancelled("waiting").computed[JOB] == 1
