"""Workers are replaced one after the other. Meanwhile the readers of streams see only short pauses."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import FinishReason

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Read, Reader

PROMPT = "Once upon a time there was a girl named Mia."
MAX_TOKENS = 1900
N_JOBS = 3
STALL_S = 2.0
SLACK = 10.0
"""Factor by which a stall may exceed `STALL_S` on a busy test machine. The lease is three times this limit."""


class Stalls(threading.Thread):
    """While the context is entered, measures the longest time without a new token for each reader."""

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


def test_a_rolling_restart_of_two_workers_loses_no_token_and_stalls_streams_only_briefly(
    environment: Environment, read: Read
) -> None:
    # The lease is long, so a job continues soon only if its worker has requeued it.
    def start() -> Command:
        return environment.start_worker(
            supervised=True, LLAMAQ_LEASE_S="60", LLAMAQ_DRAIN_S="0.2", LINGER_TOKENS="1000"
        )

    workers = [start(), start()]
    with environment.client() as client:
        readers = [read(client.submit(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True)) for _ in range(N_JOBS)]
        quiet = client.submit(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, stream=False)
        for reader in readers:
            reader.await_tokens(3)
        with Stalls(readers) as stalls_s:
            for old in workers:
                old.signal(signal.SIGTERM)
                assert old.end() == 0
                start()
            for reader in readers:
                reader.await_tokens(reader.n_tokens + 3)
        print(f"longest stalls: {', '.join(f'{stall_s:.2f} s' for stall_s in stalls_s)}")  # noqa: T201  # figures
        assert max(stalls_s) < STALL_S * SLACK

        for reader in readers:
            reader.job.cancel()
            assert reader.finish().finish_reason == FinishReason.CANCELLED
            started_by = [event.worker for event in environment.events_of(reader.job) if isinstance(event, Started)]
            assert 2 <= len(started_by) <= 3
        n_before = quiet.status().generated_tokens
        quiet.cancel()
        assert len(quiet.result().tokens) >= n_before > 0, "the requeue did not store the tokens"
