"""Ctrl-C on `llamaq up` in a terminal: the first one says what it waits for, the second one stops at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.terminal import CTRL_C, Terminal

from llamaq.producer import Client

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment


def test_the_first_ctrl_c_says_what_up_waits_for_and_the_second_one_stops_it(
    environment: Environment, free_port: int
) -> None:
    variables = environment.worker_variables(LLAMAQ_DRAIN_S="3600")
    del variables["LLAMAQ_REDIS_URL"]
    with Terminal(
        "up", "--port", str(free_port), "--no-http", columns=200, folder=environment.folder, **variables
    ) as terminal:
        terminal.read_until("worker.ready")
        with Client(f"redis://127.0.0.1:{free_port}/0", environment.queue) as client:
            job = client.submit("Once", max_tokens=1900, ignore_eos=True)
            next(job.stream())
        terminal.press(CTRL_C)
        terminal.read_until("worker.draining running=1: these jobs may finish within 3600 s (--drain-s)")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.output, terminal.output
        assert "llama.cpp" not in terminal.output  # no warnings about the shipped model
    environment.await_no_process()
