"""Calls for the dead letters of the queue."""

from __future__ import annotations

from llamaq.common.errors import DeadLetterNotFound
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails
from llamaq.producer import submission
from llamaq.producer.calls.calls_base import ClientCalls
from llamaq.producer.job_handle import AsyncJob
from llamaq.producer.queries import dead_letters


class DeadLetterCalls(ClientCalls):
    """Calls for the dead letters of the queue."""

    async def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Return the dead letters of the queue, newest first.

        A dead letter is a job that crashed several workers in a row, failed after its last retry, or is damaged. It can
        also be a stream entry that is not a job.
        """
        n_partitions = await self.connection.n_partitions()
        return await dead_letters.read_all(self.connection, self.queue, n_partitions)

    async def dead_letter(self, letter_id: str) -> DeadLetterDetails:
        """Return one dead letter, with its request and its generated tokens unless they have expired.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        return await dead_letters.read_details(self.connection, letter_id)

    async def retry_dead_letter(self, letter_id: str) -> AsyncJob:
        """Submit the job of a dead letter again as a new job, and remove the letter.

        The new job starts from its prompt, with the same request, seed and metadata. The idempotency key stays with
        the old job. Concurrent retries of one letter return the same new job.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Returns:
            The handle of the new job.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            JobNotFound: The request has expired.
            InvalidRequest: The letter is not a job, or `letter_id` does not have the form of a dead letter's id.
            QueueFull: The queue has `max_queue` waiting jobs.
            RedisFull: Redis has reached its `maxmemory`.
        """
        return await submission.retry_dead_letter(self.connection, letter_id)

    async def purge_dead_letter(self, letter_id: str) -> None:
        """Remove a dead letter. Its job then expires after `result_ttl_s`, like every other job.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        queue, letter = await dead_letters.find(self.connection, letter_id)
        if not await self.connection.scripts.purge(queue, letter.partition, letter.entry, letter.job_id):
            raise DeadLetterNotFound(letter_id)
