"""The process that compiles grammars: its limits, its end, its replacement, and its cache."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.redis_servers import wait_until

from llamaq.common.errors import EngineError, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar import sandbox as sandbox_module
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox

HOSTILE: tuple[dict[str, Any], ...] = (
    {"json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}"} for n in range(1, 40)]}},
    {"lark": "start: A\nA: " + " & ".join(f"/(?s:.*)a.{{{n}}}(?s:.*)/" for n in range(1, 40))},
)
"""llguidance needs minutes for each of these, whatever its limits are. So grammars are compiled in another process."""


OpenSandbox = Callable[..., GrammarSandbox]


@pytest.fixture
def open_sandbox(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenSandbox]:
    """A function that opens a sandbox, which is closed after the test. Its trials have a limit of processor time and no
    limit of wall time, because a busy machine needs any time for a trial.
    """
    monkeypatch.setattr(sandbox_module, "LONGEST_WAIT_FACTOR", 1000)
    with ExitStack() as sandboxes:

        def open_one(**options: Any) -> GrammarSandbox:
            sandbox = GrammarSandbox(vocab, **options)
            sandboxes.callback(sandbox.close)
            return sandbox

        yield open_one


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def stopped_process(sandbox: GrammarSandbox) -> sandbox_module._SandboxProcess:
    """Start the process of the next trial, and stop it."""
    sandbox.check(JobParams(choice=("first",)))
    process = sandbox._process
    assert process is not None
    stop(process._popen)
    return process


def await_trial(process: sandbox_module._SandboxProcess) -> None:
    """Wait until a trial was sent to a stopped process."""

    def n_unread_bytes() -> int:
        (count,) = struct.unpack("i", fcntl.ioctl(process._socket, termios.TIOCOUTQ, bytes(4)))
        return int(count)

    wait_until(n_unread_bytes, "the trial is sent")


def test_a_grammar_whose_result_is_known_does_not_wait_for_the_trial_of_another_one(sandbox: GrammarSandbox) -> None:
    request = JobParams(regex="[a-c]+")
    known = sandbox.check(request).text
    with sandbox._process_lock:  # held during a trial
        assert sandbox.check(request).text == known


def test_a_grammar_that_takes_too_long_is_refused_and_not_tried_again(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox(timeout_s=0.5)
    for constraint in HOSTILE:
        for _ in range(2):
            with pytest.raises(JobRejected, match=r"more than 0\.5 s"):
                sandbox.check(JobParams(**constraint))
            assert sandbox._process is None
    assert sandbox.check(JobParams(grammar='root ::= "a"')).text


def test_a_grammar_that_takes_long_does_not_delay_others(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox(timeout_s=0.5)
    process = stopped_process(sandbox)  # so that its trial lasts until the other grammar is compiled
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(sandbox.check, JobParams(**HOSTILE[1]))
        try:
            wait_until(lambda: process in sandbox._set_aside, "the process is set aside")
            assert sandbox.check(JobParams(regex="a")).text
            assert not hostile.done()
        finally:
            process._popen.send_signal(signal.SIGCONT)
        with pytest.raises(JobRejected, match="cannot be used"):
            hostile.result()
    assert not sandbox._set_aside
    assert sandbox.check(JobParams(regex="b")).text


@pytest.mark.parametrize("has_another", [False, True])
def test_a_process_that_was_set_aside_is_used_again_if_there_is_no_other(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch, has_another: bool
) -> None:
    sandbox = open_sandbox()
    process, patience_s = stopped_process(sandbox), sandbox_module.PATIENCE_S
    monkeypatch.setattr(sandbox_module, "PATIENCE_S", 0.01)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(sandbox.check, JobParams(regex="b"))
        wait_until(lambda: process in sandbox._set_aside, "the process is set aside")
        monkeypatch.setattr(sandbox_module, "PATIENCE_S", patience_s)
        if has_another:
            sandbox.check(JobParams(regex="c"))
        process._popen.send_signal(signal.SIGCONT)
        assert slow.result()
    assert (sandbox._process is process) is not has_another
    assert (process._popen.poll() is None) is not has_another


def test_a_sandbox_that_is_closed_ends_a_process_that_was_set_aside(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = open_sandbox()
    process = stopped_process(sandbox)
    monkeypatch.setattr(sandbox_module, "PATIENCE_S", 0.01)
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(sandbox.check, JobParams(**HOSTILE[1]))
        wait_until(lambda: process in sandbox._set_aside, "the process is set aside")
        sandbox.close()
        with pytest.raises(EngineError, match="the worker stops"):
            hostile.result(timeout=60)
    assert not sandbox._set_aside


def test_a_grammar_is_compiled_although_the_machine_gives_the_process_no_time(open_sandbox: OpenSandbox) -> None:
    timeout_s = 0.3
    sandbox = open_sandbox(timeout_s=timeout_s)
    process = stopped_process(sandbox)
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(sandbox.check, JobParams(regex="a"))
        try:
            await_trial(process)
            time.sleep(2 * timeout_s)  # wall time, which must not count
        finally:
            process._popen.send_signal(signal.SIGCONT)
        assert trial.result()


def test_a_process_that_does_not_answer_is_replaced_and_its_grammar_tried_again(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = open_sandbox(timeout_s=0.3)
    process, factor = stopped_process(sandbox), sandbox_module.LONGEST_WAIT_FACTOR
    monkeypatch.setattr(sandbox_module, "LONGEST_WAIT_FACTOR", 1)
    with pytest.raises(JobRejected, match="too busy"):
        sandbox.check(JobParams(regex="a"))
    assert process.has_ended
    monkeypatch.setattr(sandbox_module, "LONGEST_WAIT_FACTOR", factor)
    assert sandbox.check(JobParams(regex="a")).text


def test_a_process_that_died_between_two_grammars_is_replaced(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox()
    sandbox.check(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    assert sandbox.check(JobParams(grammar='root ::= "b"')).text


def test_a_grammar_whose_process_was_killed_is_tried_again(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox()
    process = stopped_process(sandbox)
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(sandbox.check, JobParams(grammar='root ::= "b"'))
        await_trial(process)
        process.kill()
        with pytest.raises(EngineError, match="was killed"):
            trial.result()
    assert sandbox.check(JobParams(grammar='root ::= "b"')).text


def test_a_process_that_aborts_refuses_its_grammar(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox()
    process = stopped_process(sandbox)
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(sandbox.check, JobParams(grammar='root ::= "b"'))
        await_trial(process)
        process._popen.send_signal(signal.SIGABRT)  # takes effect when the process continues
        process._popen.send_signal(signal.SIGCONT)
        with pytest.raises(JobRejected, match="too much memory"):
            trial.result()
    assert sandbox.check(JobParams(grammar='root ::= "c"')).text


@pytest.mark.starts_processes
def test_a_process_that_cannot_start_is_an_engine_error(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "pack_vocabulary", lambda _: b"no vocabulary")
    sandbox = open_sandbox()
    with pytest.raises(EngineError, match="does not start"):
        sandbox.check(JobParams(grammar='root ::= "a"'))


def test_the_process_starts_before_the_first_grammar(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "START_DELAY_S", 0.01)
    sandbox = open_sandbox()
    wait_until(lambda: sandbox._process is not None, "the process starts")


def test_a_sandbox_that_is_closed_early_starts_no_process(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox()
    assert sandbox._process is None
    sandbox.close()
    sandbox._start_early()
    assert sandbox._process is None


def test_a_closed_sandbox_compiles_no_more_grammars(open_sandbox: OpenSandbox) -> None:
    sandbox = open_sandbox()
    sandbox.check(JobParams(grammar='root ::= "a"'))
    sandbox.close()
    with pytest.raises(EngineError, match="the worker stops"):
        sandbox.check(JobParams(grammar='root ::= "b"'))
    assert sandbox._process is None


def test_the_process_ends_when_its_socket_is_closed(vocab: Vocab) -> None:
    process = sandbox_module._SandboxProcess(vocab, 3)
    process.await_start()
    process._socket.close()
    assert process._popen.wait(timeout=10) == 0


def test_the_oldest_results_are_removed_from_the_cache(sandbox: GrammarSandbox) -> None:
    for n in range(sandbox_module.MAX_CACHED_RESULTS + 5):
        with pytest.raises(JobRejected):
            sandbox.check(JobParams(grammar=f'other{n} ::= "x"'))
    assert len(sandbox._results) == sandbox_module.MAX_CACHED_RESULTS


def test_a_grammar_whose_words_may_match_the_longest_text_is_logged_once_without_its_text(
    sandbox: GrammarSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == sandbox_module.__name__]

    sandbox.check(JobParams(grammar='root ::= "(" root ")" | "secret"'))
    assert messages() == []
    for number in range(2):
        request = JobParams(grammar=f'root ::= "(" root ")" | "secret{number}" t\nt ::= ' + '"a"?' * 500)
        for _ in range(2):
            sandbox.check(request)
        assert len(messages()) == number + 1
    assert all(message.startswith("grammar.inexact ") and "secret" not in message for message in messages())


def test_the_process_has_no_llama_cpp_in_its_memory(sandbox: GrammarSandbox) -> None:
    sandbox.check(JobParams(regex="a"))
    assert sandbox._process is not None
    maps = Path(f"/proc/{sandbox._process._popen.pid}/maps").read_text()
    assert "llguidance" in maps
    assert "libllama" not in maps


def test_a_machine_that_has_no_room_for_a_process_is_an_engine_error(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sandbox_module, "_SandboxProcess", refuse)
    sandbox = open_sandbox()
    with pytest.raises(EngineError, match=r"does not start .*No space left"):
        sandbox.check(JobParams(grammar='root ::= "a"'))
