"""The process that tries grammars: `python -m llamaq.worker.generation.grammar.sandbox_process VOCAB_FD TIMEOUT_S`.

VOCAB_FD is the descriptor of a file that `pack_vocabulary` wrote, TIMEOUT_S the processor time that a trial may take.
The process reads requests from stdin and writes answers to stdout, both as a length (four bytes, big-endian) followed
by JSON. It ends when stdin is closed. If a grammar needs too much memory or time to compile, only this process ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from llguidance import LLMatcher

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.generation.grammar.endless_terminals import with_bounded_forcing
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark, is_exact, lark_string
from llamaq.worker.generation.grammar.grammar_vocabulary import CopiedVocabulary, GrammarVocabulary
from llamaq.worker.generation.grammar.json_schemas import json_schema_grammar
from llamaq.worker.generation.grammar.large_stack import STACK_BYTES, on_large_stack
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer

MAX_MEMORY_BYTES = STACK_BYTES + 512 * 1024 * 1024
"""Memory that the process may use in addition to the vocabulary. The stack counts as a whole."""
MAX_MESSAGE_CHARS = 400


class CompiledGrammar(NamedTuple):
    """A constraint that compiles."""

    grammar: str
    """The constraint in the form that llguidance compiles."""
    is_exact: bool = True
    """Whether it allows all texts of the constraint that was sent; see `gbnf_to_lark.is_exact`."""
    compilation_s: float = 0.0
    """Processor time that the compilation took."""


class GrammarTrial:
    """Compiles grammars for one vocabulary.

    Args:
        vocab: The model's vocabulary.
    """

    def __init__(self, vocab: GrammarVocabulary) -> None:
        self._pieces = vocab.pieces
        self._tokenizer = ConstraintTokenizer(vocab)

    def compile(self, request: dict[str, Any]) -> CompiledGrammar:
        """Compile the constraint of a request.

        Raises:
            JobRejected: The constraint cannot be used. The message gives the reason.
        """
        compiled = _convert(request, self._tokenizer.end_tokens, self._token_of)
        constraint = self._tokenizer.compile_on_this_stack(compiled.grammar)
        return compiled._replace(compilation_s=constraint.lexer.compilation_s)

    def _token_of(self, text: str) -> int | None:
        """Return the token with exactly this text. A control token is preferred. None: there is no such token."""
        data, pieces = text.encode(), self._pieces
        tokens = [token for token in pieces.tokens_with(data) if len(pieces[token]) == len(data)]
        return min(tokens, key=lambda token: (token not in pieces.hidden, token), default=None)


def _convert(
    request: dict[str, Any], end_tokens: frozenset[int], token_of: Callable[[str], int | None]
) -> CompiledGrammar:
    """Return the constraint of a request, not yet compiled. See `gbnf_to_lark` for the other arguments."""
    kind, value = request["kind"], request["value"]
    try:
        match kind:
            case "grammar":
                lark = gbnf_to_lark(value, request["root"], end_tokens, token_of)
                return CompiledGrammar(LLMatcher.grammar_from_lark(lark), is_exact(lark))
            case "json_schema":
                return CompiledGrammar(json_schema_grammar(value))
            case "regex":
                return CompiledGrammar(LLMatcher.grammar_from_regex(value))
            case "choice":
                lark = f"start: CHOICE\nCHOICE: {' | '.join(map(lark_string, value))}"
                return CompiledGrammar(LLMatcher.grammar_from_lark(lark))
            case "lark":
                return CompiledGrammar(lark_grammar(value))
    except ValueError as exc:
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"the {kind} cannot be used: {exc}") from exc
    raise AssertionError(kind)


def lark_grammar(lark: str) -> str:
    """Return a grammar in Lark in the form that `ConstraintTokenizer.compile` takes. Grammars are not checked."""
    return LLMatcher.grammar_from_lark(with_bounded_forcing(lark))


def main() -> None:
    """Answer requests until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the worker, and the worker ends this process
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        trial = GrammarTrial(CopiedVocabulary.unpack(file.read()))
    _limit_memory()
    timeout_s = float(sys.argv[2])
    on_large_stack(lambda: _serve(trial, requests, answers, timeout_s))


def _serve(trial: GrammarTrial, requests: IO[bytes], answers: IO[bytes], timeout_s: float) -> None:
    _answer(answers, {})
    while header := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # SIGPROF ends the process, also within llguidance
        answer = _try(trial, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, answer)


def _try(trial: GrammarTrial, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return trial.compile(request)._asdict()
    except JobRejected as exc:
        return {"error": exc.message[:MAX_MESSAGE_CHARS]}
    except MemoryError:
        return {"error": "the grammar cannot be used: it needs too much memory"}


def _answer(answers: IO[bytes], content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    answers.write(len(data).to_bytes(4, "big") + data)
    answers.flush()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux: only the time limit bounds the memory
        return
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
