"""The actions of the user on a queue, a job or a dead letter: the question before an action, and the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from llamaq.cli.top.line_types import DeadLine, QueueLine, SlotLine, WaitingLine
from llamaq.cli.top.reading_types import Reading
from llamaq.cli.top.table import Line
from llamaq.common.protocol.queue_config import QueueMode


class Queues(Protocol):
    """Reads the queues, and acts on them and their jobs: `LiveQueues`."""

    async def read(self, *, with_waiting: bool = False, with_dead: bool = False) -> Reading:
        """Read all queues."""

    async def pause(self, queue: str) -> None:
        """Pause a queue."""

    async def resume(self, queue: str) -> None:
        """Resume a queue."""

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job."""

    async def retry(self, letter_id: str) -> str:
        """Retry a dead letter."""


@dataclass(frozen=True, slots=True)
class Command:
    """One call that the user has asked for."""

    question: str | None
    """What the user must confirm before the call. None: the call stops nothing, so it needs no confirmation."""
    run: Callable[[Queues], Awaitable[str]]
    """Makes the call. Returns a message for the user."""


def pause_or_resume(queue: QueueLine | None) -> Command | None:
    """Return the command that pauses an open queue, and resumes a paused or draining one. None: no queue."""
    if queue is None:
        return None
    name, is_open = queue.queue, queue.mode == QueueMode.OPEN

    async def run(queues: Queues) -> str:
        await (queues.pause(name) if is_open else queues.resume(name))
        return f"Queue {name} is paused: no waiting job starts. p resumes it." if is_open else f"Queue {name} is open."

    question = f"Pause queue {name}? Its waiting jobs do not start until it is resumed." if is_open else None
    return Command(question, run)


def cancel_job(line: Line | None) -> Command | None:
    """Return the command that cancels a running or waiting job. None: the line is not a job."""
    if not isinstance(line, SlotLine | WaitingLine):
        return None
    job_id, n_tokens = line.job_id, line.generated_tokens

    async def run(queues: Queues) -> str:
        is_cancelled = await queues.cancel(job_id)
        return f"Job {job_id} is cancelled." if is_cancelled else f"Job {job_id} had ended before."

    return Command(f"Cancel job {job_id}, which has generated {n_tokens} tokens?", run)


def retry_letter(line: Line | None) -> Command | None:
    """Return the command that submits the job of a dead letter again. None: the line is no job."""
    if not isinstance(line, DeadLine) or line.job_id is None:
        return None
    letter_id = line.letter_id

    async def run(queues: Queues) -> str:
        return f"Submitted again as job {await queues.retry(letter_id)}."

    return Command(f"Submit job {letter_id} again and remove the dead letter? It is dead because: {line.reason}", run)
