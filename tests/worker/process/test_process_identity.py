"""Whether the process of another worker has ended can be told only on the machine and in the container where it ran."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.support.redis_servers import wait_until
from tests.support.worker_cards import make_card

from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.worker.process.process_identity import identify_this_process, is_dead_here

PRINT_CARD = """
import json
from llamaq.worker.process.process_identity import identify_this_process
print(json.dumps(identify_this_process()), flush=True)
input()
"""


def card(**identity: Any) -> WorkerCard:
    return make_card(**{**identify_this_process(), **identity})


def test_a_live_process_is_not_dead() -> None:
    assert not is_dead_here(card())


@pytest.mark.starts_processes
def test_a_process_that_was_killed_is_dead_before_and_after_its_parent_has_waited_for_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_CARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        killed = card(**json.loads(process.stdout.readline()))
        assert killed.pid == process.pid
        assert not is_dead_here(killed)
        process.kill()
        wait_until(lambda: is_dead_here(killed), "the process has ended")
        process.stdin.close()
    assert is_dead_here(killed)


def test_a_process_whose_pid_is_used_again_is_dead() -> None:
    assert is_dead_here(card(pid_started=card().pid_started - 1))


@pytest.mark.parametrize("other", [{"host": "b"}, {"boot_id": "b"}, {"pid_namespace": "b"}, {"pid_started": 0}])
def test_a_process_of_another_machine_or_container_is_not_known_to_be_dead(other: dict[str, Any]) -> None:
    assert not is_dead_here(card(pid=2**22, **other))
    assert is_dead_here(card(pid=2**22 + 1))
