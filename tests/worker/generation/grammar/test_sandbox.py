"""The process that compiles grammars: its limits, its end, its replacement, and its cache."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
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


def test_a_grammar_whose_result_is_known_does_not_wait_for_the_trial_of_another_one(sandbox: GrammarSandbox) -> None:
    request = JobParams(regex="[a-c]+")
    known = sandbox.compile(request)
    with sandbox._process_lock:  # held during a trial
        assert sandbox.compile(request) == known


def test_a_grammar_that_takes_too_long_is_refused_and_not_tried_again(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.5)
    for constraint in HOSTILE:
        for _ in range(2):
            with pytest.raises(JobRejected, match=r"more than 0\.5 s"):
                sandbox.compile(JobParams(**constraint))
            assert sandbox._process is None
    assert sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def test_a_grammar_that_takes_long_does_not_delay_others(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=3)
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(sandbox.compile, JobParams(**HOSTILE[1]))
        wait_until(lambda: sandbox._set_aside, "the process is set aside")
        (process,) = sandbox._set_aside
        stop(process._popen)  # so that it uses no processor time while a busy machine compiles the other grammar
        try:
            assert sandbox.compile(JobParams(regex="a"))
            assert not hostile.done()
        finally:
            process._popen.send_signal(signal.SIGCONT)
        with pytest.raises(JobRejected, match="cannot be used"):
            hostile.result()
    assert not sandbox._set_aside
    assert sandbox.compile(JobParams(regex="b"))
    sandbox.close()


@pytest.mark.parametrize("has_another", [False, True])
def test_a_process_that_was_set_aside_is_used_again_if_there_is_no_other(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch, has_another: bool
) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(regex="a"))
    process = sandbox._process
    assert process is not None
    monkeypatch.setattr(sandbox_module, "PATIENCE_S", 0.01)
    stop(process._popen)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(sandbox.compile, JobParams(regex="b"))
        wait_until(lambda: sandbox._set_aside, "the process is set aside")
        monkeypatch.undo()
        if has_another:
            sandbox.compile(JobParams(regex="c"))
        process._popen.send_signal(signal.SIGCONT)
        assert slow.result()
    assert (sandbox._process is process) is not has_another
    assert (process._popen.poll() is None) is not has_another
    sandbox.close()


def test_a_sandbox_that_is_closed_ends_a_process_that_was_set_aside(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = GrammarSandbox(vocab)
    monkeypatch.setattr(sandbox_module, "PATIENCE_S", 0.01)
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(sandbox.compile, JobParams(**HOSTILE[1]))
        wait_until(lambda: sandbox._set_aside, "the process is set aside")
        sandbox.close()
        with pytest.raises(EngineError, match="the worker stops"):
            hostile.result(timeout=5)
    assert not sandbox._set_aside


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_grammar_is_compiled_although_the_machine_gives_the_process_no_time(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.3)
    sandbox.compile(JobParams(regex="b"))
    assert sandbox._process is not None
    child = sandbox._process._popen
    stop(child)
    resume = threading.Timer(0.5, child.send_signal, [signal.SIGCONT])
    resume.start()
    try:
        assert sandbox.compile(JobParams(regex="a"))
    finally:
        resume.join()
        sandbox.close()


def test_a_process_that_does_not_answer_is_replaced_and_its_grammar_tried_again(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.3)
    sandbox.compile(JobParams(regex="b"))
    monkeypatch.setattr("llamaq.worker.generation.grammar.sandbox.LONGEST_WAIT_FACTOR", 1)
    assert sandbox._process is not None
    stop(sandbox._process._popen)
    with pytest.raises(JobRejected, match="too busy"):
        sandbox.compile(JobParams(regex="a"))
    monkeypatch.undo()
    assert sandbox.compile(JobParams(regex="a"))
    sandbox.close()


def test_a_process_that_died_between_two_grammars_is_replaced(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    assert sandbox.compile(JobParams(grammar='root ::= "b"'))
    sandbox.close()


def test_a_grammar_whose_process_was_killed_is_tried_again(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    stop(process._popen)
    killer = threading.Timer(0.2, process.kill)
    killer.start()
    with pytest.raises(EngineError, match="was killed"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    killer.join()
    assert sandbox.compile(JobParams(grammar='root ::= "b"'))
    sandbox.close()


def test_a_process_that_aborts_refuses_its_grammar(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    process = sandbox._process
    assert process is not None
    stop(process._popen)
    process._popen.send_signal(signal.SIGABRT)  # takes effect when the process continues
    resume = threading.Timer(0.2, process._popen.send_signal, [signal.SIGCONT])
    resume.start()
    with pytest.raises(JobRejected, match="too much memory"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    resume.join()
    assert sandbox.compile(JobParams(grammar='root ::= "c"'))
    sandbox.close()


@pytest.mark.starts_processes
def test_a_process_that_cannot_start_is_an_engine_error(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "pack_vocabulary", lambda _: b"no vocabulary")
    sandbox = GrammarSandbox(vocab)
    with pytest.raises(EngineError, match="does not start"):
        sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()


def test_the_process_starts_before_the_first_grammar(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "START_DELAY_S", 0.01)
    sandbox = GrammarSandbox(vocab)
    wait_until(lambda: sandbox._process is not None, "the process starts")
    sandbox.close()


def test_a_sandbox_that_is_closed_early_starts_no_process(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    assert sandbox._process is None
    sandbox.close()
    sandbox._start_early()
    assert sandbox._process is None


def test_a_closed_sandbox_compiles_no_more_grammars(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab)
    sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()
    with pytest.raises(EngineError, match="the worker stops"):
        sandbox.compile(JobParams(grammar='root ::= "b"'))
    assert sandbox._process is None


def test_the_process_ends_when_its_socket_is_closed(vocab: Vocab) -> None:
    process = sandbox_module._SandboxProcess(vocab, 3)
    process.await_start()
    process._socket.close()
    assert process._popen.wait(timeout=10) == 0


def test_the_oldest_results_are_removed_from_the_cache(sandbox: GrammarSandbox) -> None:
    for n in range(sandbox_module.MAX_CACHED_RESULTS + 5):
        with pytest.raises(JobRejected):
            sandbox.compile(JobParams(grammar=f'other{n} ::= "x"'))
    assert len(sandbox._results) == sandbox_module.MAX_CACHED_RESULTS


def test_the_process_has_no_llama_cpp_in_its_memory(sandbox: GrammarSandbox) -> None:
    sandbox.compile(JobParams(regex="a"))
    assert sandbox._process is not None
    maps = Path(f"/proc/{sandbox._process._popen.pid}/maps").read_text()
    assert "llguidance" in maps
    assert "libllama" not in maps


def test_a_machine_that_has_no_room_for_a_process_is_an_engine_error(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sandbox_module, "_SandboxProcess", refuse)
    sandbox = GrammarSandbox(vocab)
    with pytest.raises(EngineError, match=r"does not start .*No space left"):
        sandbox.compile(JobParams(grammar='root ::= "a"'))
    sandbox.close()
