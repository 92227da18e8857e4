"""The interface of a prepared request for endpoints and batches: its jobs, and the answer built from their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from llamaq.producer import Result


class PreparedRequest(Protocol):
    """A request whose jobs can be submitted."""

    @property
    def jobs(self) -> Sequence[dict[str, Any]]:
        """The arguments of `submit` for each job."""

    @property
    def n_choices(self) -> int:
        """Number of jobs for each prompt. The jobs of one prompt follow each other."""

    async def answer(self, results: Sequence[Result]) -> Any:
        """Return the body of the answer.

        Args:
            results: The result of each job.

        Raises:
            LlamaqError: The answer needs a worker, and none has replied; or the results do not fit the request.
        """
