"""The warden of grammars: bounds them, and has them tried in another process, before the engine sees them.

llama.cpp aborts, recurses, hangs or grows without end on some grammars. What it does in the child process costs that
process, and the job that brought the grammar.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from typing import Any

from llamaq.common.errors import EngineError, ErrorCode, JobRejected
from llamaq.common.protocol.job_request import MAX_GRAMMAR_BYTES, JobParams
from llamaq.worker.generation.grammar.text_checks import check_nesting, check_text

logger = logging.getLogger(__name__)

START_S = 60.0
TRY_S = 10.0
MAX_VERDICTS = 128


class GrammarSandbox:
    """Compiles grammars safely. Thread-safe; `compile` can take up to `TRY_S` seconds."""

    def __init__(self, blob: bytes, *, try_s: float = TRY_S) -> None:
        """`blob` is the model's vocabulary. The child process starts at once and loads it while others go on."""
        self._blob = blob
        self._try_s = try_s
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, str | JobRejected] = OrderedDict()
        self._child: _Child | None = _Child(blob)

    def compile(self, request: JobParams) -> str:
        """The GBNF text of the request's grammar or JSON schema; its root is `request.grammar_root`.

        Raises `JobRejected` when it is too large, does not compile, or takes too much time or memory.
        """
        question = _question(request)
        with self._lock:
            verdict = self._verdicts.get(question)
            if verdict is None:
                verdict = self._verdicts[question] = self._ask(question)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(question)
        if isinstance(verdict, JobRejected):
            raise JobRejected(verdict.code, verdict.message)
        return verdict

    def close(self) -> None:
        """End the child process, also in the middle of a trial, which then fails; may be called twice."""
        child = self._child
        if child is not None:
            child.end()  # without the lock: who tries a grammar has it
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child = None

    def _ask(self, question: str) -> str | JobRejected:
        child = self._child = self._child or _Child(self._blob)
        try:
            child.await_start()
            answer = child.ask(question, self._try_s)
        except TimeoutError:
            failure = f"it takes more than {self._try_s:g} s to try"
        except (OSError, EOFError):
            if not child.has_started:
                self._child = None
                raise EngineError(f"the process that tries grammars does not start (status {child.kill()})") from None
            failure = "it needs too much memory, or llama.cpp cannot bear it"
        else:
            return answer["grammar"] if "grammar" in answer else _rejected(answer["error"])
        self._child = None
        logger.warning("grammar.child_failed status=%s: %s", child.kill(), failure)
        return _rejected(f"the grammar cannot be used: {failure}")

    def __repr__(self) -> str:
        return f"<GrammarSandbox child={self._child} verdicts={len(self._verdicts)}>"


class _Child:
    """The process, and the socket that is its stdin and stdout."""

    def __init__(self, blob: bytes) -> None:
        self.has_started = False
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(blob)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "llamaq.worker.generation.grammar.sandbox_process", str(file.fileno())],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                pass_fds=(file.fileno(),),
            )

    def await_start(self) -> None:
        """Wait until the vocabulary is loaded."""
        if not self.has_started:
            self._receive(time.monotonic() + START_S)
            self.has_started = True

    def ask(self, question: str, timeout_s: float) -> dict[str, str]:
        """Send a question and wait for its answer. Raises `TimeoutError`, `OSError` or `EOFError`."""
        until_s = time.monotonic() + timeout_s
        data = question.encode()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
        return self._receive(until_s)

    def end(self) -> None:
        """Let it end; who waits for its answer gets an `EOFError`."""
        self._process.kill()

    def kill(self) -> int:
        """End it and give its exit status."""
        self._socket.close()
        self._process.kill()
        return self._process.wait()

    def _receive(self, until_s: float) -> dict[str, str]:
        n_bytes = int.from_bytes(self._read(4, until_s), "big")
        answer: dict[str, str] = json.loads(self._read(n_bytes, until_s))
        return answer

    def _read(self, n_bytes: int, until_s: float) -> bytes:
        parts = bytearray()
        while len(parts) < n_bytes:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            part = self._socket.recv(n_bytes - len(parts))
            if not part:
                raise EOFError("the process has ended")
            parts += part
        return bytes(parts)

    def __repr__(self) -> str:
        return f"<{'started' if self.has_started else 'starting'} pid={self._process.pid}>"


def _question(request: JobParams) -> str:
    """The request to the child, after what can be checked without it."""
    question: dict[str, Any] = {"grammar": request.grammar, "root": request.grammar_root, "schema": None}
    if request.grammar is not None:
        check_text(request.grammar)
        return json.dumps(question)
    if request.grammar_root != "root":
        raise _rejected("grammar_root goes with grammar, not with json_schema")
    check_nesting(request.json_schema)
    question["schema"] = request.json_schema
    text = json.dumps(question)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _rejected(f"the JSON schema is larger than {MAX_GRAMMAR_BYTES} bytes")
    return text


def _rejected(message: str) -> JobRejected:
    return JobRejected(ErrorCode.INVALID_GRAMMAR, message)
