"""The soak's checker finds what is wrong: each record here has one defect, made by hand, and is caught for that."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.soak.chaos import POINTS, KillPlan, dice, draw_job, phase_of
from tests.soak.checker import RESULT, STORED, Checker, Verdict
from tests.soak.report import Outcome, percentiles
from tests.soak.scenarios.cancels import Record

from llamaq.common.protocol.job_events import Event, Failed, Finished, Started, Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result

JOB = "q.0.0"
READER = "reader"


def tokens(offset: int, *ids: int) -> Tokens:
    """An event in which each token is a letter of the text."""
    return Tokens(offset=offset, tokens=ids, text_offset=offset, text="".join(map(letter, ids)))


def letter(token: int) -> str:
    return chr(ord("a") + token)


END = Finished(finish_reason=FinishReason.LENGTH, stats=JobStats())
STREAM: list[Event] = [Started(attempt=1, worker="w"), tokens(0, 1, 2), tokens(2, 3), tokens(3, 4, 5), END]


def seen(stored: list[Event], read: list[Event], **demands: int | str | bool) -> Checker:
    checker = Checker()
    checker.accept(JOB, **{"n_tokens": 5, **demands})
    checker.began(STORED, JOB)
    checker.began(READER, JOB)
    for event in stored:
        checker.saw(STORED, JOB, event)
    for event in read:
        checker.saw(READER, JOB, event)
    return checker


def faults(verdict: Verdict) -> set[str]:
    """The kinds of violations that were found."""
    return {kind for kind, count in verdict.counts.items() if count}


def test_what_was_read_as_it_was_stored_is_clean() -> None:
    verdict = seen(STREAM, STREAM[1:]).judge()
    assert verdict.is_clean
    assert list(verdict.lines()) == []
    assert (verdict.n_jobs, verdict.n_readings, verdict.n_tokens) == (1, 2, 5)


def test_a_stream_that_is_read_in_other_pieces_is_clean() -> None:
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
def test_a_doctored_record_is_caught_for_what_is_wrong(fault: str, stored: list[Event], read: list[Event]) -> None:
    verdict = seen(stored, read).judge()
    assert fault in faults(verdict)
    assert any(line.startswith(f"{fault}: {JOB}") for line in verdict.lines())


def test_tokens_that_come_after_the_end_are_caught() -> None:
    assert {"second_ends"} <= faults(seen([*STREAM, tokens(5, 6)], STREAM[1:]).judge())


def test_a_job_that_fails_or_ends_for_another_reason_is_caught() -> None:
    failed = [*STREAM[:-1], Failed(code="internal", message="")]
    assert faults(seen(failed, failed[1:]).judge()) == {"wrong_ends"}
    assert faults(seen(STREAM, STREAM[1:], ending="stop").judge()) == {"wrong_ends"}
    assert seen(failed, failed[1:], ending="failed internal").judge().is_clean


def test_another_text_than_the_undisturbed_one_is_caught() -> None:
    assert seen(STREAM, STREAM[1:], text="bcdef").judge().is_clean
    assert faults(seen(STREAM, STREAM[1:], text="bcdeg").judge()) == {"changed"}


def test_a_result_that_differs_from_the_stream_is_caught() -> None:
    checker = seen(STREAM, STREAM[1:])
    ended = {"finish_reason": FinishReason.LENGTH, "stats": JobStats(), "seed": 1}
    checker.saw_result(JOB, Result.model_validate({"job_id": JOB, "text": "bcdef", "tokens": (1, 2, 3, 4), **ended}))
    assert faults(checker.judge()) == {"gaps"}


def test_a_job_without_a_stream_is_compared_with_its_result() -> None:
    def progress_line(*read: Event) -> Verdict:
        checker = seen([STREAM[0], END], [*read], streams=False)
        checker.began(STORED, JOB, is_whole=False)
        checker.began(RESULT, JOB)
        for event in (tokens(0, 1, 2, 3, 4, 5), END):
            checker.saw(RESULT, JOB, event)
        return checker.judge()

    assert progress_line(tokens(0, 1, 2, 3, 4, 5), END).is_clean
    assert faults(progress_line(tokens(0, 1, 2, 3, 4, 6), END)) == {"changed"}


def test_a_reader_that_left_early_may_miss_the_rest_but_not_read_twice_or_otherwise() -> None:
    for read, expected in (
        (STREAM[1:2], set()),
        ([], set()),
        ([*STREAM[1:2], *STREAM[1:2]], {"repeats"}),
        ([tokens(0, 1, 7)], {"changed"}),
    ):
        checker = seen(STREAM, [*read])
        checker.began(READER, JOB, is_whole=False)
        assert faults(checker.judge()) == expected


def test_a_cancelled_job_may_be_short_but_not_long() -> None:
    short: list[Event] = [tokens(0, 1), END]
    assert seen(short, short, may_be_short=True).judge().is_clean
    assert faults(seen(STREAM, STREAM[1:], may_be_short=True, n_tokens=4).judge()) == {"repeats"}


def test_a_complaint_fails_a_soak_and_is_shown() -> None:
    checker = seen(STREAM, STREAM[1:])
    checker.complain("a target was missed")
    outcome = Outcome("takeover", checker.judge(), {"p99": 9})
    assert outcome.as_json["passed"] is False
    assert "FAILED  takeover" in str(outcome)
    assert "a target was missed" in str(outcome)


def test_a_plan_kills_in_every_phase_its_share_and_the_same_seed_plans_the_same() -> None:
    def carried_out(seed: int) -> tuple[KillPlan, list[dict[str, Any]]]:
        plan, given = KillPlan(dice(seed, "kills"), 13), []
        while arms := plan.arms([]):
            given.append(arms)
            plan.note(arms["point"])
        return plan, given

    plan, given = carried_out(1)
    assert plan.is_done
    assert plan.n_done == 13
    assert set(plan.done) == set(POINTS)
    assert set(plan.done.values()) == {2, 3}
    assert carried_out(1)[1] == given
    assert carried_out(2)[1] != given


def test_a_plan_is_not_done_while_a_phase_lacks_its_share() -> None:
    plan = KillPlan(random.Random(1), len(POINTS))
    for _ in range(20):
        plan.note("outside")
    assert not plan.is_done
    assert plan.n_done == 1
    assert phase_of("outside") == "outside"


def test_jobs_are_drawn_from_the_seed() -> None:
    first, again, other = (draw_job(dice(seed, "jobs")) for seed in (1, 1, 2))
    assert first == again != other


def test_percentiles_of_few_values_are_not_smaller_than_what_was_seen() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"count": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) == {"count": 0}


def cancelled(state: str, *after: dict[str, object], ticks_between: int = 0) -> Record:
    tick = {"what": "tick", "jobs": {JOB: 1}}
    arrived, taken = {"what": "cancel.arrived", "job": JOB}, {"what": "cancel.taken", "job": JOB, "state": state}
    return Record([tick, arrived, *[tick] * ticks_between, {**taken, "freed": True}, *after])


def test_the_record_of_cancels_counts_the_ticks_until_a_slot_is_free() -> None:
    assert cancelled("decode").ticks_to_free["decode"] == [0]
    assert cancelled("decode", ticks_between=2).ticks_to_free["decode"] == [2]
    assert cancelled("decode").computed_after == []
    assert cancelled("decode", {"what": "tick", "jobs": {JOB: 2}}).computed_after == [JOB]
    assert cancelled("waiting").computed[JOB] == 1
