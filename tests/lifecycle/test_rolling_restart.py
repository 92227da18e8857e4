"""Workers are replaced one after the other, and nobody who reads a stream notices more than a short pause."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from llamaq.common.messages import Started
from llamaq.producer import Job

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Reader, Stage

    Read = Callable[[Job], Reader]

PROMPT = "Once upon a time there was a girl named Mia."
MAX_TOKENS = 1200
N_JOBS = 3
STALL_S = 2.0
SLACK = 3.0
"""A test machine may be this much slower than the promise is for."""


class Stalls(threading.Thread):
    """The longest time for which each of some readers got nothing, while the block lasts and they read."""

    def __init__(self, readers: list[Reader]) -> None:
        super().__init__(daemon=True)
        self._readers = readers
        self._is_over = threading.Event()
        self.longest_s = [0.0] * len(readers)

    def __enter__(self) -> list[float]:
        self.start()
        return self.longest_s

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        seen = [(reader.n_tokens, time.monotonic()) for reader in self._readers]
        while not self._is_over.wait(0.01):
            now = time.monotonic()
            for index, reader in enumerate(self._readers):
                n_tokens, since_s = seen[index]
                if reader.n_tokens != n_tokens or not reader.is_alive():
                    seen[index] = (reader.n_tokens, now)
                self.longest_s[index] = max(self.longest_s[index], now - since_s)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_rolling_restart_of_two_workers_drops_nothing_and_stalls_no_stream_for_long(
    stage: Stage, read: Read, supervised: bool
) -> None:
    # Long leases: what goes on soon was handed back.
    options = {"LLAMAQ_LEASE_S": "60", "LLAMAQ_DRAIN_S": "0.2", "supervised": supervised}
    workers = [stage.start_worker(**options) for _ in range(2)]  # type: ignore[arg-type]
    with stage.client() as client:
        readers = [
            read(client.submit(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0)) for _ in range(N_JOBS)
        ]
        quiet = client.submit(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0, stream=False)
        for reader in readers:
            reader.await_tokens(3)
        with Stalls(readers) as stalls_s:
            for old in workers:
                old.signal(signal.SIGTERM)
                assert old.end() == 0
                stage.start_worker(**options)  # type: ignore[arg-type]
            for reader in readers:
                assert len(reader.finish().tokens) == MAX_TOKENS
        print(f"longest stalls: {', '.join(f'{stall_s:.2f} s' for stall_s in stalls_s)}")  # noqa: T201  # figures
        assert len(quiet.result().tokens) == MAX_TOKENS
        for job in (*(reader.job for reader in readers), quiet):
            events = stage.events_of(job) if job is not quiet else []
            assert sum(isinstance(event, Started) for event in events) <= 3
        assert max(stalls_s) < STALL_S * SLACK
        assert sum("accepted=True" in line for worker in workers for line in worker.output.splitlines()) > 0
