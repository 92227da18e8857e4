"""The process that tries grammars: `python -m llamaq.worker.generation.grammar.sandbox_process VOCAB_FD`.

VOCAB_FD is the descriptor of a file with the model's vocabulary. The process reads requests from stdin and writes
answers to stdout, both as a length (four bytes, big-endian) followed by JSON. It ends when stdin is closed. If a
grammar needs too much memory or time, only this process is affected.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from llguidance import LLMatcher

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.json_schema.rewriting import rewrite_schema
from llamaq.common.protocol.schema_options import SCHEMA_OPTIONS
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.gbnf import gbnf_to_lark, lark_string
from llamaq.worker.generation.grammar.large_stack import STACK_BYTES, on_large_stack
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint

MAX_MEMORY_BYTES = STACK_BYTES + 512 * 1024 * 1024
"""Memory that the process may use in addition to the vocabulary. The stack counts as a whole."""
WALK_TOKENS = 40
"""Upper bound on the tokens of a walk. A walk generates one short output."""
WALK_S = 0.06
"""Upper bound on the time of a walk."""
N_WALKS = 4
MAX_MESSAGE_CHARS = 400


class GrammarTrial:
    """Compiles grammars for one vocabulary, and generates some tokens with each.

    Args:
        vocab: The model's vocabulary.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._tokenizer = ConstraintTokenizer(vocab)
        self._end_tokens = sorted(vocab.end_tokens)
        self._lengths = np.array([len(vocab.piece(token)) for token in range(vocab.n_tokens)])

    def compile(self, request: dict[str, Any]) -> str:
        """Try the constraint of a request, and return it in the form that llguidance compiles.

        Raises:
            JobRejected: The constraint cannot be used. The message gives the reason.
        """
        compiled = _convert(request)
        self._walk_all(compiled)
        return compiled

    def _walk_all(self, compiled: str) -> None:
        """Generate short outputs with random tokens and with the longest tokens.

        If a grammar is too complex, this usually shows within these short outputs.
        """
        constraint = self._tokenizer.compile_on_this_stack(compiled)
        if not constraint.allowed_mask().any():
            message = "the grammar cannot be used: no token of this model's vocabulary is allowed first"
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, message)
        rng = random.Random(0)

        def longest(allowed: Sequence[int]) -> int:
            return int(max(allowed, key=lambda token: self._lengths[token]))

        choices: list[Callable[[Sequence[int]], int]] = [longest, *[rng.choice] * N_WALKS]
        for choose in choices:
            self._walk(self._tokenizer.compile_on_this_stack(compiled), choose)

    def _walk(self, constraint: TokenConstraint, choose: Callable[[Sequence[int]], int]) -> None:
        """Generate tokens with `choose` until only end tokens are allowed, or `WALK_TOKENS` or `WALK_S` is reached."""
        deadline_s = time.monotonic() + WALK_S
        generated: list[int] = []
        while len(generated) < WALK_TOKENS and time.monotonic() < deadline_s:
            allowed = constraint.allowed_mask().copy()
            allowed[self._end_tokens] = False
            if not allowed.any():
                return
            generated.append(int(choose(np.flatnonzero(allowed).tolist())))
            constraint.accept(generated)


def _convert(request: dict[str, Any]) -> str:
    """Return the constraint of a request in the form that llguidance compiles."""
    kind, value = request["kind"], request["value"]
    name = "JSON schema" if kind == "json_schema" else kind
    try:
        match kind:
            case "grammar":
                return LLMatcher.grammar_from_lark(gbnf_to_lark(value, request["root"]))
            case "json_schema":
                options: Any = SCHEMA_OPTIONS  # a typed dictionary of llguidance, which `common` does not import
                return LLMatcher.grammar_from_json_schema(json.dumps(rewrite_schema(value)), overrides=options)
            case "regex":
                return LLMatcher.grammar_from_regex(value)
            case "choice":
                return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(lark_string, value))}")
            case "lark":
                return LLMatcher.grammar_from_lark(value)
    except ValueError as exc:
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"the {name} cannot be used: {exc}") from exc
    raise AssertionError(kind)


def main() -> None:
    """Answer requests until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the worker, and the worker ends this process
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        trial = GrammarTrial(Vocab.from_blob(file.read()))
    _limit_memory()
    on_large_stack(lambda: _serve(trial, requests, answers))


def _serve(trial: GrammarTrial, requests: IO[bytes], answers: IO[bytes]) -> None:
    _answer(answers, {})
    while header := requests.read(4):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        try:
            _answer(answers, {"grammar": trial.compile(request)})
        except JobRejected as exc:
            _answer(answers, {"error": exc.message[:MAX_MESSAGE_CHARS]})
        except MemoryError:
            _answer(answers, {"error": "the grammar cannot be used: it needs too much memory"})


def _answer(answers: IO[bytes], content: dict[str, str]) -> None:
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
