"""The process in which grammars are tried: `python -m llamaq.worker.generation.grammar.sandbox_process BLOB_FD`.

It reads requests from stdin and writes answers to stdout, both as a length (four bytes, big-endian) and JSON, and ends
when stdin does. A grammar that kills or hangs llama.cpp does so here.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf

from llamaq.common.errors import JobRejected
from llamaq.common.vocab.vocab import Vocab
from llamaq.worker.generation.grammar.compiled_grammar import Grammar
from llamaq.worker.generation.grammar.text_checks import check_text

MEMORY_BYTES = 512 * 1024 * 1024
"""What one grammar may take beyond the vocabulary."""
N_SHOWN, N_LONGEST = 2048, 256
"""Tokens that a walk chooses from."""
WALK_TOKENS = 40
WALK_S = 0.06
N_REPEATING = 4
MESSAGE_CHARS = 400

Choose = Callable[[Sequence[int], int | None], int]


class GrammarTrial:
    """Compiles grammars on one vocabulary and takes some steps with each."""

    def __init__(self, vocab: Vocab, messages: IO[bytes]) -> None:
        self._vocab = vocab
        self._messages = messages
        """Where llama.cpp's complaints go: what this process writes to stderr."""
        tokens = np.arange(vocab.n_tokens)
        lengths = np.array([len(vocab.piece(int(token))) for token in tokens])
        self._all = tokens
        self._longest = np.argsort(-lengths, kind="stable")[:N_LONGEST]

    def compile(self, request: dict[str, Any]) -> str:
        """The grammar as GBNF, after it was tried. Raises `ValueError` or `JobRejected` saying what is wrong."""
        text, root = request["grammar"], request["root"]
        if text is None:
            text, root = self._convert(request["schema"]), "root"
        check_text(text)
        self._forget_messages()
        try:
            Grammar(self._vocab, text, root).close()
        except JobRejected as exc:
            raise ValueError(explain(self._read_messages(), text) or exc.message) from None
        self._try(text, root)
        return str(text)

    def _convert(self, schema: Any) -> str:
        try:
            return str(json_schema_to_gbnf(json.dumps(schema)))
        except Exception as exc:  # the converter asserts, looks up missing keys and recurses
            raise ValueError(
                f"the JSON schema cannot be turned into a grammar: {str(exc) or type(exc).__name__}"
            ) from exc

    def _try(self, text: str, root: str) -> None:
        """Walk along: at random, repeating what can be repeated, and by the longest tokens."""
        chance = random.Random(0)
        grammar = Grammar(self._vocab, text, root)
        if not grammar.allowed(self._all).any():
            raise ValueError("no token of this model's vocabulary can begin it")

        def at_random(allowed: Sequence[int], _last: int | None) -> int:
            return chance.choice(allowed)

        def repeating(allowed: Sequence[int], last: int | None) -> int:
            return last if last is not None and last in allowed else chance.choice(allowed)

        def longest(allowed: Sequence[int], _last: int | None) -> int:
            return max(allowed, key=lambda token: len(self._vocab.piece(token)))

        for choose in (at_random, longest, *[repeating] * N_REPEATING):
            self._walk(Grammar(self._vocab, text, root), choose, chance)

    def _walk(self, grammar: Grammar, choose: Choose, chance: random.Random) -> None:
        some = np.array(chance.sample(range(self._vocab.n_tokens), min(N_SHOWN, self._vocab.n_tokens)))
        shown = np.unique(np.concatenate((some, self._longest)))
        until_s = time.monotonic() + WALK_S
        taken: list[int] = []
        while len(taken) < WALK_TOKENS and time.monotonic() < until_s:
            allowed = self._allowed(grammar, shown) or self._allowed(grammar, self._all)
            if not allowed:
                return
            taken.append(choose(allowed, taken[-1] if taken else None))
            grammar.follow(taken)

    def _allowed(self, grammar: Grammar, tokens: np.ndarray[Any, Any]) -> list[int]:
        """Tokens that may follow, without those that would end the walk."""
        allowed: list[int] = tokens[grammar.allowed(tokens)].tolist()
        return [token for token in allowed if token not in self._vocab.end_tokens]

    def _forget_messages(self) -> None:
        self._messages.seek(0)
        self._messages.truncate()

    def _read_messages(self) -> str:
        self._messages.seek(0)
        return self._messages.read().decode(errors="replace")


def explain(messages: str, text: str) -> str:
    """llama.cpp's complaint about a grammar, with line and column instead of the rest of the grammar."""
    complaint = messages.partition("error parsing grammar: ")[2].partition(f"\n\n{text}\n")[0] or messages
    what, found, rest = complaint.partition(" at ")
    if found and text.endswith(rest):
        before = text[: len(text) - len(rest)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f"{what} at line {line}, column {column}"
    return complaint.strip().splitlines()[0][:200] if complaint.strip() else ""


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, whose end is ours
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        vocab = Vocab.from_blob(file.read())
    with tempfile.TemporaryFile() as messages:
        for descriptor in (1, 2):
            os.dup2(messages.fileno(), descriptor)
        llama_cpp.llama_log_set(_log_callback, None)
        _limit_memory()
        _serve(GrammarTrial(vocab, messages), requests, answers)


def _serve(trial: GrammarTrial, requests: IO[bytes], answers: IO[bytes]) -> None:
    _answer(answers, {})
    while header := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        try:
            _answer(answers, {"grammar": trial.compile(request)})
        except JobRejected as exc:
            _answer(answers, {"error": exc.message[:MESSAGE_CHARS]})
        except (ValueError, MemoryError, RecursionError) as exc:
            _answer(answers, {"error": f"the grammar cannot be used: {str(exc) or type(exc).__name__}"[:MESSAGE_CHARS]})


def _answer(answers: IO[bytes], content: dict[str, str]) -> None:
    data = json.dumps(content).encode()
    answers.write(len(data).to_bytes(4, "big") + data)
    answers.flush()


def _write_message(level: int, text: bytes, _user_data: Any) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR, and lines that go on
        os.write(2, text)


_log_callback = llama_cpp.llama_log_callback(_write_message)  # llama.cpp keeps a pointer to it


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux; then the time limit alone bounds it
        return
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
