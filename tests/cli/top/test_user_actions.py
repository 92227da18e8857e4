"""The questions and messages of the actions of `llamaq top`."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

from tests.support.top_readings import job_id, make_letter, make_queue, make_reading, make_summary, make_worker

from llamaq.cli.top.rates import RateTracker
from llamaq.cli.top.summarize_reading import summarize
from llamaq.cli.top.user_actions import Command, cancel_job, pause_or_resume, retry_letter


async def run(command: Command | None, queues: Any) -> str:
    assert command is not None
    return await command.run(queues)


async def test_a_queue_that_is_not_open_is_resumed_without_a_question() -> None:
    overview = summarize(make_reading(make_queue(), make_queue("bulk", mode="draining")), RateTracker())
    chat, bulk = (pause_or_resume(line) for line in overview.queues)
    assert chat is not None
    assert bulk is not None
    assert "Pause queue chat?" in (chat.question or "")
    assert bulk.question is None
    queues = AsyncMock()
    assert "p resumes it" in await run(chat, queues)
    assert "is open" in await run(bulk, queues)
    queues.pause.assert_awaited_once_with("chat")
    queues.resume.assert_awaited_once_with("bulk")
    assert pause_or_resume(None) is None


async def test_only_jobs_are_cancelled_and_only_jobs_are_retried() -> None:
    worker = make_worker(jobs={0: (job_id("chat", 1), 7)})
    letters = (make_letter("chat", 3), make_letter("chat", 4, is_job=False))
    queue = make_queue(workers=(worker,), listed=(make_summary("chat", 2),), dead=letters)
    overview = summarize(make_reading(queue), RateTracker())
    (slot,), (waiting,), (dead, garbage) = overview.slots, overview.waiting, overview.dead
    queues = AsyncMock()
    queues.cancel.side_effect = [True, False]
    queues.retry.return_value = "new"
    command = cancel_job(slot)
    assert "generated 7 tokens" in (command.question or "" if command else "")
    assert "is cancelled" in await run(command, queues)
    assert "had ended before" in await run(cancel_job(waiting), queues)
    assert "as job new" in await run(retry_letter(dead), queues)
    assert cancel_job(overview.workers[0]) is cancel_job(None) is None
    assert retry_letter(garbage) is retry_letter(slot) is None
