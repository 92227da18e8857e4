"""The process that tries grammars: `python -m llamaq.worker.generation.grammar.sandbox_process VOCAB_FD`.

VOCAB_FD is the descriptor of a file with the model's vocabulary. The process reads requests from stdin and writes
answers to stdout, both as a length (four bytes, big-endian) followed by JSON. It ends when stdin is closed. If
llama.cpp aborts or hangs on a grammar, only this process is affected.
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
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.compiled_grammar import Grammar
from llamaq.worker.generation.grammar.static_checks import check_grammar

MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Memory that the process may use in addition to the vocabulary."""
N_RANDOM_TOKENS, N_LONGEST_TOKENS = 2048, 256
"""Numbers of random tokens and of longest tokens from which a walk first chooses. A walk generates one short output."""
WALK_TOKENS = 40
"""Upper bound on the tokens of a walk."""
WALK_S = 0.06
"""Upper bound on the time of a walk."""
N_REPEATING_WALKS = 4
MAX_MESSAGE_CHARS = 400

Choose = Callable[[Sequence[int], int | None], int]


class GrammarTrial:
    """Compiles grammars for one vocabulary, and generates some tokens with each.

    Args:
        vocab: The model's vocabulary.
        messages: The file to which stderr is redirected. It receives the error messages of llama.cpp.
    """

    def __init__(self, vocab: Vocab, messages: IO[bytes]) -> None:
        self._vocab = vocab
        self._messages = messages
        tokens = np.arange(vocab.n_tokens)
        lengths = np.array([len(vocab.piece(int(token))) for token in tokens])
        self._all = tokens
        self._longest = np.argsort(-lengths, kind="stable")[:N_LONGEST_TOKENS]

    def compile(self, request: dict[str, Any]) -> str:
        """Try the grammar or JSON schema of a request, and return it as GBNF.

        Raises:
            ValueError, JobRejected: The grammar or schema cannot be used. The message gives the reason.
        """
        text, root = request["grammar"], request["root"]
        if text is None:
            text, root = self._convert(request["schema"]), "root"
        check_grammar(text)
        self._clear_messages()
        try:
            Grammar(self._vocab, text, root).close()
        except JobRejected as exc:
            raise ValueError(error_message(self._read_messages(), text) or exc.message) from None
        self._walk_all(text, root)
        return str(text)

    def _convert(self, schema: Any) -> str:
        try:
            return str(json_schema_to_gbnf(json.dumps(schema)))
        except Exception as exc:  # the converter raises AssertionError, KeyError, RecursionError and others
            raise ValueError(
                f"the JSON schema cannot be converted to a grammar: {str(exc) or type(exc).__name__}"
            ) from exc

    def _walk_all(self, text: str, root: str) -> None:
        """Generate short outputs with random tokens, with repeated tokens, and with the longest tokens.

        If llama.cpp crashes or hangs on a grammar, it usually does so within these short outputs.
        """
        rng = random.Random(0)
        grammar = Grammar(self._vocab, text, root)
        if not grammar.allowed_mask(self._all).any():
            raise ValueError("no token of this model's vocabulary is allowed first")

        def at_random(allowed: Sequence[int], _last: int | None) -> int:
            return rng.choice(allowed)

        def repeating(allowed: Sequence[int], last: int | None) -> int:
            return last if last is not None and last in allowed else rng.choice(allowed)

        def longest(allowed: Sequence[int], _last: int | None) -> int:
            return max(allowed, key=lambda token: len(self._vocab.piece(token)))

        for choose in (at_random, longest, *[repeating] * N_REPEATING_WALKS):
            self._walk(Grammar(self._vocab, text, root), choose, rng)

    def _walk(self, grammar: Grammar, choose: Choose, rng: random.Random) -> None:
        """Generate tokens with `choose` until only end tokens are allowed, or `WALK_TOKENS` or `WALK_S` is reached."""
        random_tokens = np.array(rng.sample(range(self._vocab.n_tokens), min(N_RANDOM_TOKENS, self._vocab.n_tokens)))
        subset = np.unique(np.concatenate((random_tokens, self._longest)))
        deadline_s = time.monotonic() + WALK_S
        generated: list[int] = []
        while len(generated) < WALK_TOKENS and time.monotonic() < deadline_s:
            allowed = self._allowed(grammar, subset) or self._allowed(grammar, self._all)
            if not allowed:
                return
            generated.append(choose(allowed, generated[-1] if generated else None))
            grammar.accept(generated)

    def _allowed(self, grammar: Grammar, tokens: np.ndarray[Any, Any]) -> list[int]:
        """Return the tokens of `tokens` that the grammar allows, without end tokens."""
        allowed: list[int] = tokens[grammar.allowed_mask(tokens)].tolist()
        return [token for token in allowed if token not in self._vocab.end_tokens]

    def _clear_messages(self) -> None:
        self._messages.seek(0)
        self._messages.truncate()

    def _read_messages(self) -> str:
        self._messages.seek(0)
        return self._messages.read().decode(errors="replace")


def error_message(messages: str, text: str) -> str:
    """Return llama.cpp's error message about a grammar.

    llama.cpp appends the rest of the grammar to the message. The line and the column of the error replace this rest.
    """
    message = messages.partition("error parsing grammar: ")[2].partition(f"\n\n{text}\n")[0] or messages
    error, found, rest = message.partition(" at ")
    if found and text.endswith(rest):
        before = text[: len(text) - len(rest)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f"{error} at line {line}, column {column}"
    return message.strip().splitlines()[0][:200] if message.strip() else ""


def main() -> None:
    """Answer requests until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the worker, and the worker ends this process
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
            _answer(answers, {"error": exc.message[:MAX_MESSAGE_CHARS]})
        except (ValueError, MemoryError, RecursionError) as exc:
            message = f"the grammar cannot be used: {str(exc) or type(exc).__name__}"
            _answer(answers, {"error": message[:MAX_MESSAGE_CHARS]})


def _answer(answers: IO[bytes], content: dict[str, str]) -> None:
    data = json.dumps(content).encode()
    answers.write(len(data).to_bytes(4, "big") + data)
    answers.flush()


def _write_message(level: int, text: bytes, _user_data: Any) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR and GGML_LOG_LEVEL_CONT
        os.write(2, text)


_log_callback = llama_cpp.llama_log_callback(_write_message)  # llama.cpp keeps a pointer to the callback


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux: only the time limit bounds the memory
        return
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
