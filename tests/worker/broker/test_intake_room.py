"""How many jobs an intake may claim, without Redis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamaq.worker.broker.intake import Intake
from llamaq.worker.scheduling.bulk_share import BulkShare

CAPACITY = 4


@pytest.mark.parametrize(
    ("n_claimed", "n_interactive", "n_starting", "rooms"),
    [
        (0, 0, 0, (4, 4, 1)),
        (2, 1, 0, (2, 3, 0)),
        (2, 1, 1, (1, 2, 0)),
        (4, 4, 0, (0, 0, 1)),
        (3, 3, 1, (0, 0, 0)),
        (4, 2, 2, (-2, 0, 0)),
    ],
)
async def test_the_jobs_that_a_worker_is_starting_count_in_each_of_its_rooms(
    n_claimed: int, n_interactive: int, n_starting: int, rooms: tuple[int, int, int]
) -> None:
    outbox: Any = SimpleNamespace(n_claimed=n_claimed, n_interactive=n_interactive)
    starts: Any = SimpleNamespace(n_starting=n_starting)
    claims: Any = None
    intake = Intake(
        claims, outbox, starts, capacity=CAPACITY, bulk_share=BulkShare(0.1, CAPACITY), is_alive=lambda: True
    )
    assert (intake.room, intake.interactive_room, intake.bulk_room) == rooms
