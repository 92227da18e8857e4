"""Compiles grammars in another process before the engine uses them.

The limits of llguidance bound each step of a compiled grammar, and most compilations. They do not bound the
intersection of regular expressions, such as `&` in Lark or `allOf` with several `pattern`. The compilation of 40
patterns takes minutes, even with the smallest `initial_lexer_fuel`. Such a grammar ends only the sandbox process, and
only the job with this grammar fails. A plain JSON schema cannot be such a grammar, and neither can the grammar of tool
calls with plain schemas. So these are not compiled twice.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from llamaq.common.errors import EngineError, ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.protocol.output_params import MAX_GRAMMAR_BYTES
from llamaq.worker.generation.grammar.answer_grammars import answer_part_of_limits
from llamaq.worker.generation.grammar.grammar_vocabulary import GrammarVocabulary, pack_vocabulary
from llamaq.worker.generation.grammar.json_schemas import PlainGrammar, plain_schema_grammar
from llamaq.worker.generation.grammar.sandbox_process import lark_grammar

log = logging.getLogger(__name__)

START_DELAY_S = 30.0
"""The process starts this time after the worker has loaded its model, or with the first grammar if that comes earlier.
So it takes no processor time while the worker starts."""
START_TIMEOUT_S = 60.0
"""How long the process may take to load the vocabulary."""
TRIAL_TIMEOUT_S = 10.0
"""Processor time that a trial of a grammar may take. It is not a wall time, so other programs on the machine do not
change the result."""
PATIENCE_S = 1.0
"""How long a trial keeps the next one waiting. Then its process is set aside, and the next trial gets another process.
With a vocabulary of 151,936 tokens, large grammars take 0.3 s, and a process takes 0.7 s to start."""
LONGEST_WAIT_FACTOR = 12
"""How much longer than its processor time a trial may take on a busy machine."""
MAX_CACHED_RESULTS = 128
"""Number of grammars whose results are cached."""
QUICK_S = 0.02
"""Largest processor time of a trial after which a compilation counts as quick."""
QUICK_PART = 0.15
"""Largest size of a plain grammar that is compiled quickly, as a part of the limits of plain grammars. Usual grammars
of this size take 2 to 5 ms, the most expensive ones 40."""


class CheckedGrammar(NamedTuple):
    """A constraint that may be compiled in the worker."""

    text: str
    """The constraint in the form that `ConstraintTokenizer.compile` takes."""
    compiles_quickly: bool
    """Whether the compilation takes about as long as a tick."""


class GrammarSandbox:
    """Tries grammars safely. Thread-safe. The process starts with the first grammar, or after `START_DELAY_S`.

    A process tries one grammar after the other. While a grammar takes more than `PATIENCE_S`, another process tries the
    next ones.

    Args:
        vocab: The model's vocabulary.
        timeout_s: Processor time that a trial of a grammar may take, in seconds.
    """

    def __init__(self, vocab: GrammarVocabulary, *, timeout_s: float = TRIAL_TIMEOUT_S) -> None:
        self._vocab = vocab
        self._timeout_s = timeout_s
        self._results_lock = threading.Lock()
        self._results: OrderedDict[str, CheckedGrammar | JobRejected] = OrderedDict()
        self._process_lock = threading.Lock()
        """Held during a trial, until its process is set aside."""
        self._process: _SandboxProcess | None = None
        """The process of the next trial."""
        self._set_aside: set[_SandboxProcess] = set()
        """The processes that are busy with a trial of more than `PATIENCE_S`."""
        self._closed = threading.Event()
        self._starter = threading.Timer(START_DELAY_S, self._start_early)
        self._starter.name, self._starter.daemon = "llamaq-grammar-start", True
        self._starter.start()

    def check(self, request: JobParams) -> CheckedGrammar:
        """Return the constraint of a request in the form that `ConstraintTokenizer.compile` takes.

        That method may still refuse a constraint that is not tried here, such as a plain JSON schema.

        Raises:
            JobRejected: The grammar is too large, does not compile, or needs too much time or memory.
            EngineError: The process does not start, was killed, or `close` was called.
        """
        trial = _trial_request(request)
        result = self._cached_result(trial)  # does not wait for the trial of another grammar
        if result is None:
            result = self._convert(trial, request) or self._try(trial)
        if isinstance(result, JobRejected):
            raise JobRejected(result.code, result.message)
        return result

    def _convert(self, trial: str, request: JobParams) -> CheckedGrammar | None:
        """Return the result of a constraint that needs no trial, or None."""
        grammar = None
        if request.json_schema:
            grammar = plain_schema_grammar(request.json_schema)
        elif request.lark and (part := answer_part_of_limits(request.lark)) <= 1:
            grammar = PlainGrammar(lark_grammar(request.lark), part)
        if grammar is None:
            return None
        result = CheckedGrammar(grammar.text, compiles_quickly=grammar.part_of_limits <= QUICK_PART)
        self._cache_result(trial, result)
        return result

    def _try(self, trial: str) -> CheckedGrammar | JobRejected:
        """Return the result of a grammar, after the trials that run before it."""
        with ExitStack() as turn:
            turn.enter_context(self._process_lock)
            result = self._cached_result(trial)
            if result is None:
                result = self._run_trial(trial, turn)
                self._cache_result(trial, result)
            return result

    def _cached_result(self, trial: str) -> CheckedGrammar | JobRejected | None:
        with self._results_lock:
            result = self._results.get(trial)
            if result is not None:
                self._results.move_to_end(trial)
            return result

    def _cache_result(self, trial: str, result: CheckedGrammar | JobRejected) -> None:
        with self._results_lock:
            self._results[trial] = result
            if len(self._results) > MAX_CACHED_RESULTS:
                self._results.popitem(last=False)

    def close(self) -> None:
        """End the processes. Running trials fail, and so do later ones. May be called twice."""
        self._closed.set()
        self._starter.cancel()
        for process in (self._process, *self._set_aside):
            if process is not None:
                process.kill()  # does not wait for the lock, because a running trial holds it
        with self._process_lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _start_early(self) -> None:
        """Start the process before the first grammar, so that this grammar does not wait for it."""
        with self._process_lock:
            if not self._starter.finished.is_set():  # `close` sets it
                with suppress(EngineError):  # the first grammar tries it again
                    self._ensure_process()

    def _ensure_process(self) -> _SandboxProcess:
        """Return the process, and start it if there is none, or if it ended while it had no trial.

        Raises:
            EngineError: The process does not start.
        """
        if self._process is not None and self._process.has_ended:
            log.warning("grammar.child_ended status=%s", self._process.close())
            self._process = None
        try:
            self._process = self._process or _SandboxProcess(self._vocab, self._timeout_s)
        except OSError as exc:
            raise EngineError(f"the process that compiles grammars does not start ({exc})") from exc
        return self._process

    def _run_trial(self, trial: str, turn: ExitStack) -> CheckedGrammar | JobRejected:
        """Return the result of a trial. A process that fails is replaced in the next trial.

        Args:
            trial: The grammar to try.
            turn: Holds the lock. It is closed when the process is set aside.

        Raises:
            JobRejected: The machine is too busy for the trial. A repeated request tries again.
            EngineError: The process does not start, was killed, or `close` was called.
        """
        self._check_open()
        process = self._ensure_process()
        if self._closed.is_set():  # `close` may have looked for the process before it was started
            process.kill()

        def set_aside() -> None:
            self._set_aside.add(process)
            self._process = None
            turn.close()

        try:
            process.await_start()
            answer = process.request(trial, LONGEST_WAIT_FACTOR * self._timeout_s, on_slow=set_aside)
        except (TimeoutError, OSError, EOFError) as exc:
            self._forget(process)
            return self._failure(process, is_late=isinstance(exc, TimeoutError))
        if process in self._set_aside:
            self._take_back(process)
        if "error" in answer:
            return _rejected(answer["error"])
        if not answer["is_exact"]:
            log.warning("grammar.inexact trial_chars=%d: some of its words match only the longest text", len(trial))
        return CheckedGrammar(answer["grammar"], compiles_quickly=answer["compilation_s"] <= QUICK_S)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineError("the worker stops: it compiles no more grammars")

    def _forget(self, process: _SandboxProcess) -> None:
        if process in self._set_aside:
            self._set_aside.remove(process)
        else:
            self._process = None

    def _take_back(self, process: _SandboxProcess) -> None:
        """Use a process that was set aside for the next trial, or end it if there is another one."""
        with self._process_lock:
            self._set_aside.remove(process)
            if self._process is None and not self._closed.is_set():
                self._process = process
                return
        process.close()

    def _failure(self, process: _SandboxProcess, *, is_late: bool) -> JobRejected:
        """Return the result of a trial whose process has ended or is late.

        A result is cached, because the same grammar would fail again. What a later trial may change is raised instead.

        Raises:
            JobRejected: The machine is too busy for the trial.
            EngineError: The process does not start, was killed, or `close` was called.
        """
        status = process.close()
        self._check_open()
        if not process.has_started:
            raise EngineError(f"the process that compiles grammars does not start (status {status})")
        log.warning("grammar.child_failed status=%s", status)
        if is_late:
            raise _rejected("the grammar was not compiled in time: the worker's machine is too busy; try again")
        if status == -signal.SIGKILL:
            raise EngineError("the process that compiles grammars was killed; the machine may have too little memory")
        if status == -signal.SIGPROF:
            return _rejected(f"the grammar cannot be used: it takes more than {self._timeout_s:g} s to compile")
        return _rejected("the grammar cannot be used: it needs too much memory")

    def __repr__(self) -> str:
        return f"<GrammarSandbox process={self._process} results={len(self._results)}>"


class _SandboxProcess:
    """The sandbox process, and the socket that is its stdin and stdout.

    Args:
        vocab: The model's vocabulary.
        timeout_s: Processor time of the process for a trial, in seconds. A trial that takes more ends the process.
    """

    def __init__(self, vocab: GrammarVocabulary, timeout_s: float) -> None:
        self.has_started = False
        self._socket, process_socket = socket.socketpair()
        try:
            self._popen = self._start(vocab, timeout_s, process_socket)
        except OSError:
            self._socket.close()
            raise

    def _start(
        self, vocab: GrammarVocabulary, timeout_s: float, process_socket: socket.socket
    ) -> subprocess.Popen[bytes]:
        with process_socket, tempfile.TemporaryFile() as file:
            file.write(pack_vocabulary(vocab))
            file.seek(0)
            return subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "llamaq.worker.generation.grammar.sandbox_process"),
                    *(str(file.fileno()), str(timeout_s)),
                ],
                stdin=process_socket.fileno(),
                stdout=process_socket.fileno(),
                stderr=subprocess.DEVNULL,
                pass_fds=(file.fileno(),),
            )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, for example because the kernel killed it when memory ran out."""
        return self._popen.poll() is not None

    def await_start(self) -> None:
        """Wait until the process has loaded the vocabulary.

        Raises:
            TimeoutError: Loading takes more than `START_TIMEOUT_S`.
            OSError, EOFError: The process has ended.
        """
        if not self.has_started:
            self._receive(time.monotonic() + START_TIMEOUT_S)
            self.has_started = True

    def request(self, trial: str, timeout_s: float, on_slow: Callable[[], None]) -> dict[str, Any]:
        """Send a trial, and wait for its answer. Calls `on_slow` if there is none after `PATIENCE_S`.

        Raises:
            TimeoutError: There is no answer within `timeout_s`.
            OSError, EOFError: The process has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        data = trial.encode()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
        self._socket.settimeout(PATIENCE_S)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            on_slow()
        return self._receive(deadline_s)

    def kill(self) -> None:
        """Kill the process. A thread that waits for an answer gets an `EOFError`."""
        self._popen.kill()

    def close(self) -> int:
        """Kill the process, free its resources, and return its exit status."""
        self._socket.close()
        self._popen.kill()
        return self._popen.wait()

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        n_bytes = int.from_bytes(self._read(4, deadline_s), "big")
        answer: dict[str, Any] = json.loads(self._read(n_bytes, deadline_s))
        return answer

    def _read(self, n_bytes: int, deadline_s: float) -> bytes:
        parts = bytearray()
        while len(parts) < n_bytes:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = self._socket.recv(n_bytes - len(parts))
            if not part:
                raise EOFError("the process has ended")
            parts += part
        return bytes(parts)

    def __repr__(self) -> str:
        return f"<{'started' if self.has_started else 'starting'} pid={self._popen.pid}>"


def _trial_request(request: JobParams) -> str:
    """Check the size of the schema, and return the JSON text to send to the sandbox process."""
    (kind,) = request.constraints
    if kind != "grammar" and request.grammar_root not in (None, "root"):
        raise _rejected(f"grammar_root is only allowed with grammar, not with {kind}")
    text = json.dumps({"kind": kind, "value": getattr(request, kind), "root": request.grammar_root or "root"})
    if kind == "json_schema" and len(text) > MAX_GRAMMAR_BYTES:
        raise _rejected(f"the JSON schema is larger than {MAX_GRAMMAR_BYTES} bytes")
    return text


def _rejected(message: str) -> JobRejected:
    return JobRejected(ErrorCode.INVALID_GRAMMAR, message)
