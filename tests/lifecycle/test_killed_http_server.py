"""The waiting jobs of a killed HTTP server end without a slot. Those of another server wait on."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
from tests.lifecycle.conftest import wait_until
from tests.lifecycle.test_http_takeover import start_server

from llamaq.common.protocol.job_outcome import FinishReason, JobState

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

N_WAITING = 3
BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 5}


def ask(url: str) -> httpx.Response | None:
    """Return the answer to a chat. None: the server was killed."""
    with suppress(httpx.TransportError):
        return httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60)
    return None


def test_the_waiting_jobs_of_a_killed_server_end_while_other_jobs_keep_every_slot_busy(
    environment: Environment,
) -> None:
    environment.start_worker("--n-parallel", "1", "--inbox-window", "0", "--disconnect-s", "2", LINGER_TOKENS="5")
    (killed, killed_url), (_, url) = start_server(environment), start_server(environment)
    with environment.client() as client, ThreadPoolExecutor(N_WAITING + 1) as pool:
        busy = client.submit("Once upon a time", max_tokens=2000, ignore_eos=True)
        wait_until(lambda: busy.status().state is JobState.RUNNING, "the only slot is taken")
        lost = [pool.submit(ask, killed_url) for _ in range(N_WAITING)]
        wait_until(lambda: client.queue_depth().waiting == N_WAITING, "the jobs of the first server wait")
        lost_ids = [each.job_id for each in client.jobs() if each.job_id != busy.id]
        live = pool.submit(ask, url)
        wait_until(lambda: client.queue_depth().waiting == N_WAITING + 1, "the job of the second server waits")
        killed.signal(signal.SIGKILL)
        wait_until(lambda: client.queue_depth().waiting == 1, "the jobs of the killed server have ended")
        for job_id in lost_ids:
            status = client.job(job_id).status()
            assert (status.finish_reason, status.started_ms) == (FinishReason.CANCELLED, None)
        assert busy.status().state is JobState.RUNNING
        assert [each.result() for each in lost] == [None] * N_WAITING
        busy.cancel()
        environment.let_jobs_finish()
        answer = live.result()
        assert answer is not None
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
